"""Other people's engines with the joint layer in them: thin, each with an extra of its own."""
