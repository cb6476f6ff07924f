"""Kernels of a test module on the CPU, right and broken; it names them by SOURCE and EXPORTS."""

from __future__ import annotations

import ctypes

import pytest
from cuda_threads import C_TYPES, Mutant, exports_of, kernels_on_cpu, mutants_on_cpu


@pytest.fixture(scope="module")
def kernels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ctypes.CDLL:
    """Return the kernels of SOURCE, in the module's DTYPES or else in all."""
    module = request.module
    dtypes = exports_of(getattr(module, "DTYPES", list(C_TYPES)))
    exports = f"#define KERNELS parallel_ext\n{module.EXPORTS}{dtypes}"
    return kernels_on_cpu(module.SOURCE, exports, tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def mutants(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Mutant]:
    """Return the kernels of SOURCE in fp64, broken by each of the module's MUTATIONS."""
    module, folder = request.module, tmp_path_factory.mktemp("mutants")
    return mutants_on_cpu(module.SOURCE, module.EXPORTS, folder, module.MUTATIONS)
