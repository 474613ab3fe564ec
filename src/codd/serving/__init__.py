"""The server: an engine that batches requests, its HTTP surface, and the page that shows what the model does."""
