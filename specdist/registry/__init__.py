"""Released drafters: immutable versions, the champion alias that serving reads, and their record in MLflow."""
