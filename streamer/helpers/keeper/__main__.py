"""Starts the keeper: `python -I -S PATH/streamer/helpers/keeper/__main__.py SOCKET [IDLE_SECONDS]`.

`-I -S` leaves sys.path with the standard library alone. Only the package `streamer` is made importable, by
its own path. Its parent directory stays out of sys.path, so no other module there can be imported or replace
one of the standard library.
"""

import os
import sys
from types import ModuleType

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_streamer = ModuleType("streamer")
_streamer.__path__ = [_PACKAGE]
sys.modules["streamer"] = _streamer

from streamer.helpers.keeper.server import main  # noqa: E402 - needs the lines above

sys.exit(main(sys.argv[1:]))
