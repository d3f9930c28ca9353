"""python train.py --config configs/grid_pathfinding.yaml"""

from surprisal_jax.cli import main

raise SystemExit(main())
