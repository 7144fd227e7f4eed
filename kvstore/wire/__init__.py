"""Wire: the only place that knows both the protocol's messages and the model's values."""
