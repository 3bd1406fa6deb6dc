"""SGLang's HTTP server on a machine without CUDA. The engine launcher runs this file with this folder on PYTHONPATH.

Three things differ from `python -m sglang.launch_server`:
- Its processes fork from the first one instead of importing everything again: a third of the memory and half the
  start-up time. Safe here because no device context exists and the first process has started no computing thread.
- Packages that only serve GPU kernels are hidden. SGLang treats each as optional; their imports take many seconds, or
  fail where there is no driver (flash_mla).
- The accelerator's module is torch.cpu. A torch built for CUDA names torch.cuda wherever it runs, and releasing memory
  synchronises what it names.
"""

import multiprocessing
import os
import sys

_GPU_ONLY = ("cutlass", "deep_gemm", "flash_attn", "flash_mla", "flashinfer", "megatron", "timm")


def main() -> None:
    """Serve until SIGTERM."""
    for name in _GPU_ONLY:
        sys.modules[name] = None  # type: ignore[assignment]

    import torch

    module_of = torch.get_device_module
    torch.get_device_module = lambda device=None: module_of(device or "cpu")

    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: start_method("fork", force=True)  # type: ignore[assignment]
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
