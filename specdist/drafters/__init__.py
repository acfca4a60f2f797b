"""Everything that proposes tokens, behind one interface (`base`): a draft model at work (`causal_lm`), Medusa heads
(`heads`). A draft model is made by `initial`, of `prune`, `vocabulary` and `adapter`."""
