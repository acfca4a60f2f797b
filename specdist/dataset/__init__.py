"""Training data from the target: prompts, its own answers as token ids, and training examples."""
