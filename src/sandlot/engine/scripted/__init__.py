"""The scripted policy: an engine whose model is a script per task, for tests and for machines without a model."""
