"""Puts the double of NVSHMEM in the place of what nvshmem4py calls in C."""

from double import Double


def install(double: Double) -> None:
    """Put a double in the place of what nvshmem4py calls, and forget what it knew of another."""
    import cuda.core
    import nvshmem.bindings
    from nvshmem.core import _internal_tracking as tracking
    from nvshmem.core import direct, init_fini, nvshmem_types

    class Device:
        def __init__(self, device_id: int) -> None:
            self.device_id = device_id

        def set_current(self) -> None:
            pass

    tracking._mr_references.clear()
    tracking._cached_device["device"] = None
    tracking._is_initialized["status"] = tracking.InternalInitStatus.UNINITIALIZED
    cuda.core.Device = Device
    for module in (direct, init_fini):
        module.load_nvidia_dynamic_lib = lambda name: None
    for name in ("malloc", "free", "ptr"):
        setattr(nvshmem_types, name, getattr(double, name))
    for name in REPLACED:
        setattr(nvshmem.bindings, name, getattr(double, name))
    nvshmem.bindings.my_pe = lambda: double.pe
    nvshmem.bindings.n_pes = lambda: double.n_pes
    # Then a buffer needs no driver.
    nvshmem_types.NvshmemResource.is_device_accessible = property(lambda self: False)
    nvshmem_types.NvshmemResource.is_host_accessible = property(lambda self: True)


REPLACED = [
    *("ptr", "init_status", "get_uniqueid", "set_attr_uniqueid_args", "hostlib_init_attr"),
    *("hostlib_finalize", "putmem_nbi_on_stream", "putmem_signal_on_stream", "quiet_on_stream"),
    *("signal_op_on_stream", "signal_wait_until_on_stream", "barrier_all_on_stream"),
]
