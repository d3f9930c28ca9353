"""Tasks whose answers come from several hidden strategies.

Importing this package imports no numpy: the configuration needs only the names.
"""

from __future__ import annotations

import importlib

from surprisal_jax.tasks.task import Instance, Task

TASK_NAMES: tuple[str, ...] = (
    "grid_pathfinding",
    "sorting_algorithms",
    "multidigit_addition",
    "linear_equations",
    "base_conversion",
    "greatest_common_divisor",
)

__all__ = ["TASK_NAMES", "Instance", "Task", "get_task"]


def get_task(name: str, size: int | None = None) -> Task:
    """The task of that name, in its module of that name.

    Args:
      size: its difficulty; None: the task's own default.

    Raises:
      ValueError: no task has that name, which lists the names; or it does not take that size.
    """
    if name not in TASK_NAMES:
        raise ValueError(f"task: got {name!r}, expected one of {', '.join(TASK_NAMES)}")
    module = importlib.import_module(f"surprisal_jax.tasks.{name}")
    task: Task = getattr(module, name.title().replace("_", ""))(size)
    return task
