"""Messages ⇄ token ids: rendering, continuity, and parsing of what the model wrote."""
