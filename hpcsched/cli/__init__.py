"""The commands; each is imported when it is used."""
