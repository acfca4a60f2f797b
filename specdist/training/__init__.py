"""Training: one file per drafter family around a Hugging Face trainer, and the callbacks they share."""
