"""Programs that people know, under hpcsched: as they are, suspended and resumed, promoted."""
