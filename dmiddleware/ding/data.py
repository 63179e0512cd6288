"""The face of ``ding.data``."""

from dmiddleware.classic import (
    DequeBuffer,
    PriorityExperienceReplay,
    clone_object,
    group_sample,
    padding,
    sample_range_view,
    staleness_check,
    use_time_check,
)

__all__ = [
    "DequeBuffer",
    "FileModelLoader",
    "FileStorageLoader",
    "PriorityExperienceReplay",
    "clone_object",
    "group_sample",
    "padding",
    "sample_range_view",
    "staleness_check",
    "use_time_check",
]

FileModelLoader = None
FileStorageLoader = None
