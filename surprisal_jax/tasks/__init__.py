"""Tasks whose answers come from several hidden strategies.

Importing this package imports no numpy: the configuration needs only the names.
"""

from __future__ import annotations

from surprisal_jax.tasks.task import Instance, Task

TASK_NAMES: tuple[str, ...] = ("grid_pathfinding",)

__all__ = ["TASK_NAMES", "Instance", "Task", "get_task"]


def get_task(name: str) -> Task:
    """The task of that name.

    Raises:
      ValueError: no task has that name; lists the names.
    """
    if name == "grid_pathfinding":
        from surprisal_jax.tasks.grid_pathfinding import GridPathfinding

        return GridPathfinding()
    raise ValueError(f"task: got {name!r}, expected one of {', '.join(TASK_NAMES)}")
