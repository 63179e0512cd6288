"""Buffer middleware: what a buffer does around push, sample, update, delete and clear.

Each is given to ``buffer.use``. All of them serve a :class:`~dmiddleware.data.DequeBuffer`; those
that make sense for rows of columns serve a :class:`~dmiddleware.data.TensorBuffer` as well, and the
others say at ``use`` what to do instead there.

| name | DequeBuffer | TensorBuffer |
| --- | --- | --- |
| :class:`PriorityExperienceReplay` | yes | no: ``sampler=PrioritySampler()`` |
| :func:`clone_object` | yes | no: it copies anyway |
| :func:`staleness_check` | yes | yes, by the column ``collect_iter`` |
| :func:`use_time_check` | yes | yes |
| :func:`group_sample` | yes | no: ``unroll_len`` |
| :func:`padding` | yes | no: ``unroll_pad`` |
| :func:`sample_range_view` | yes | yes |
"""

from dmiddleware.data.buffer_middleware.checks import staleness_check, use_time_check
from dmiddleware.data.buffer_middleware.clone import clone_object
from dmiddleware.data.buffer_middleware.group import group_sample, padding
from dmiddleware.data.buffer_middleware.priority import PriorityExperienceReplay
from dmiddleware.data.buffer_middleware.view import sample_range_view

__all__ = [
    "PriorityExperienceReplay",
    "clone_object",
    "staleness_check",
    "use_time_check",
    "group_sample",
    "padding",
    "sample_range_view",
]
