"""`python -m hpcsched` is `hpcsched`."""

from hpcsched.cli.main import main

main()
