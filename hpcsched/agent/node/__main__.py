"""`python -m hpcsched.agent.node` is the node agent."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcsched.agent.node import guard
from hpcsched.agent.node.agent import NodeAgent, say
from hpcsched.agent.node.connection import HeadConnection
from hpcsched.agent.node.own_host import end_orphans, own_name, show_granted
from hpcsched.devices import open_devices
from hpcsched.errors import ConfigError
from hpcsched.launch.remote import protocol
from hpcsched.launch.remote.channel import MessageChannel
from hpcsched.launch.remote.keys import read_join
from hpcsched.open_files import raise_limit


def main(arguments: Sequence[str] | None = None) -> int:
    """Join the run of the given join file and serve it to its end."""
    parser = argparse.ArgumentParser(prog="hpcsched.agent.node", description="A run's agent on one host.")
    parser.add_argument("--join", type=Path, required=True, metavar="FILE", help="written by the head agent")
    parser.add_argument("--name", help="this host's name in the run; default: as the batch system calls it")
    options = parser.parse_args(arguments)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # until they are listened to they would only end us
        signal.signal(number, signal.SIG_IGN)
    try:
        join = read_join(options.join)
        name = own_name(join, options.name, os.environ, socket.gethostname())
        watch = guard.Guard(join.run_id, guard.mark(join.life, name))
        with contextlib.ExitStack() as stack:
            connection = HeadConnection(join, name)
            stack.callback(connection.close)
            end_orphans(join, lambda: connection.send(MessageChannel().unnumbered(protocol.Coming(name))))
            show_granted(join, name, os.environ)
            devices = open_devices(join.devices, name, cpus=join.cpus.get(name))
            stack.callback(devices.close)
            raise_limit()
            node = NodeAgent(join, options.join.parent, name, devices, connection)
            try:
                node.run()
            finally:
                if not node.close():
                    stack.pop_all()  # a driver that hangs would hang us too
        watch.dismiss()
    except ConfigError as error:
        say(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
