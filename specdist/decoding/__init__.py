"""The real speculative decoder, which certifies replay and is timed."""
