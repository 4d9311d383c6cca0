"""Plans and models of speed: pure functions of profiles and jobs."""
