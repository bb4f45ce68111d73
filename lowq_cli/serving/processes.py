"""How the server's process starts others: an engine's, and those that read pictures."""

from multiprocessing import get_context
from multiprocessing.context import ForkServerContext, SpawnContext

# "fork" would be unsafe in a process with threads or a CUDA context
context: SpawnContext | ForkServerContext = get_context("spawn")
