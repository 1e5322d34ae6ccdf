"""Prints the library in use, how many threads a product starts beside torch's, and the OpenMP runtimes in memory."""

import os
import re
from pathlib import Path

import torch

from groupgrad.kernels import library, status

inputs, weight, output = torch.ones(64, 512), torch.ones(512, 512), torch.empty(64, 512)
expected = inputs @ weight.T
torch.set_num_threads(4)
(torch.ones(1 << 20) + 1).sum()  # starts torch's threads
before = len(os.listdir("/proc/self/task"))
kernels = library()
assert kernels is not None, status()
kernels.groupgrad_linear(inputs.data_ptr(), weight.data_ptr(), None, output.data_ptr(), 64, 512, 512, False, 4)
started = len(os.listdir("/proc/self/task")) - before
assert torch.equal(output, expected)
files = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
print(status(), started, sum(re.search("lib[gi]?omp[^/]*$", file) is not None for file in files), sep="; ")
