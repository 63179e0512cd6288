import sys
from pathlib import Path

import torch

# The examples are not an installed package; they run from the root of the repository.
ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

torch.set_num_threads(1)
