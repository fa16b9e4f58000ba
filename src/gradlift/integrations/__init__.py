"""Sinks for the tools that people use already: `Journal(path, also=[TensorBoard(folder)])`.

Each needs its own package, imported when the sink is made and not before.

>>> from gradlift.integrations import TensorBoard
>>> TensorBoard.__name__
'TensorBoard'
"""

from .mlflow import MLflow
from .tensorboard import TensorBoard
from .wandb import WandB

__all__ = ["TensorBoard", "WandB", "MLflow"]
