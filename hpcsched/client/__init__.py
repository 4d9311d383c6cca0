"""What changes a run, and asks it, from outside: for the commands, and for programs (`hpcsched.Run`)."""
