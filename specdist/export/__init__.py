"""What serving engines open: one file per drafter family, and the record that stands beside the weights."""
