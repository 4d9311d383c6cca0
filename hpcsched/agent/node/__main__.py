"""`python -m hpcsched.agent.node` is the node agent."""

from __future__ import annotations

import sys

from hpcsched.agent.node.agent import main

sys.exit(main())
