"""The command `profile`: measurements of models, and what to do with them."""
