"""The face of ``ding.data``: buffers, files and datasets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torch.utils.data import DataLoader as DataLoader
from torch.utils.data import Dataset as Dataset

from dmiddleware.ding.data.buffer import *  # noqa: F403
from dmiddleware.ding.data.shm_buffer import *  # noqa: F403
from dmiddleware.ding.data.storage import *  # noqa: F403
from dmiddleware.ding.utils.data import create_dataset as create_dataset
from dmiddleware.ding.utils.data import offline_data_save_type as offline_data_save_type

REFUSED: Final[Mapping[str, str]] = {
    "LevelSampler": "prioritized level replay is not here; use middleware.Curriculum",
    "ModelLoader": "use FileModelLoader",
    "StorageLoader": "use FileStorageLoader",
}
