"""The server: an engine that batches requests, the HTTP API in front of it, and the playground page."""
