"""The stages that both recipes call, in the order of the chain: run → data → assess → release.

Each skips what is finished, continues what was interrupted, and reads nothing but the artefacts before it.
"""
