"""Variables that torch reads when it is imported: `conftest.py` imports this first."""

import os

# Threads that spin while they wait for each other take the cores from the other processes: on two
# busy cores, 4 to 10 times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
