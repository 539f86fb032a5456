"""The device's side of measuring: TVM's RPC server, in a process that outlives what it runs.

    serve(bind("127.0.0.1", 9190), threads=2)        # for ever; each connection is served by a fork of its own
    python -c 'from mhsa_compile.tuning.measure.rpc_server import child; child(2)'  # a free port; ends with its stdin

A candidate that crashes takes its fork along, one that hangs is ended by the server when its connection's time is up.
Beside TVM's own functions a connection finds `mhsa.device`, which says what this machine is, and `mhsa.seconds`, a
clock for calls whose inputs change. Runtime dependencies only.

TVM's RPC asks for no password, and runs what it is sent: whoever reaches the port owns the account. So it is bound to
loopback unless told otherwise, and belongs into trusted networks only.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import struct
import threading
from contextlib import suppress
from ipaddress import ip_address
from time import perf_counter
from typing import Any, NoReturn

import msgspec

from mhsa_compile.errors import DeviceError, InstallationError
from mhsa_compile.hardware import environment, host, tile_permission
from mhsa_compile.records.device import Device, GpuDevice
from mhsa_compile.runtime import cuda_devices, tvm_runtime
from mhsa_compile.tuning.measure.ready_connections import ReadyConnections

LOOPBACK = "127.0.0.1"
DEVICE = "mhsa.device"
"""The name of the global function that returns `device.Device` as JSON."""
SECONDS = "mhsa.seconds"
"""The name of the global function that is `seconds`."""
ANSWER = 5.0
"""Seconds in which a tracker says that it is one."""
_ENDS_WITH_PARENT = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
_LOG = logging.getLogger("mhsa.serve")

Address = tuple[str, int]


def this_device(emulated: bool = False, *, gpu: bool = False) -> Device:
    """What this machine is. `emulated` is for an emulator that `host.is_emulated` does not notice.

    `gpu` also asks for its first GPU, and so starts the driver, which a process that forks must not do before that.
    """
    return Device(
        cpu=host.cpu_model(),
        cores=host.allowed_cpus(),
        architecture=host.architecture(),
        l1d_kib=host.cache_kib(1),
        l2_kib=host.cache_kib(2),
        emulated=emulated or host.is_emulated(),
        features=tuple(sorted(host.usable_features())),
        gpu=_gpu() if gpu else None,
        microarchitecture=host.microarchitecture_name(),
    )


def _gpu() -> GpuDevice | None:
    gpu = cuda_devices.first()
    if gpu is None:
        return None
    return GpuDevice(name=gpu.name, capability=gpu.capability, multiprocessors=gpu.multiprocessors)


def seconds(module: Any, calls: int, sets: int, *arguments: Any) -> float:
    """Seconds of a call of the module's `run`, over `calls` of them that take `sets` sets of arguments in turn."""
    run, size = module["run"], len(arguments) // sets
    sets_of_arguments = [arguments[i * size : (i + 1) * size] for i in range(sets)]
    _wait(arguments[-1].device)
    begin = perf_counter()
    for i in range(calls):
        run(*sets_of_arguments[i % sets])
    _wait(arguments[-1].device)
    return (perf_counter() - begin) / calls


def _wait(device: Any) -> None:
    """Waits until a GPU has made its calls, which it is only sent; a CPU has made them when they return."""
    if device.type == cuda_devices.FAMILY:
        tvm_runtime.start_cuda().wait(device.index)


def bind(address: str = LOOPBACK, port: int = 0) -> socket.socket:
    """A listening socket; port 0 is a free one. Raises DeviceError."""
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, port), family=family)
    except (OSError, OverflowError) as error:
        hint = "Choose another --port (0 is any that is free), or a --host that is this machine's."
        raise DeviceError(f"{address}:{port}", "an address to listen at", str(error), hint) from error


def parsed(text: str, argument: str) -> Address:
    """The address that HOST:PORT says, an IPv6 address in brackets. Raises DeviceError that names the argument."""
    name, _, port = text.rpartition(":")
    if not name or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise DeviceError(argument, "HOST:PORT, such as 192.168.1.7:9190", repr(text))
    return name.strip("[]"), int(port)


def is_loopback(name: str) -> bool:
    """Whether an address is reached from its own machine only."""
    with suppress(OSError, ValueError):
        return ip_address(socket.getaddrinfo(name, None)[0][4][0]).is_loopback
    return False


def require_tracker(tracker: Address) -> None:
    """Raises DeviceError unless a tracker answers: TVM's own calls wait for one for a minute, or for ever."""
    from tvm.rpc import base

    place = f"tracker {tracker[0]}:{tracker[1]}"
    ports = f"--port {tracker[1]} --port-end {tracker[1] + 1}"  # its own end is 9199, whatever the port
    hint = f"Start it there: python -m tvm.exec.rpc_tracker --host {tracker[0]} {ports}"
    try:
        with socket.create_connection(tracker, timeout=ANSWER) as connection:
            connection.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
            answer = base.recvall(connection, 4)
    except (OSError, UnicodeError) as error:
        raise DeviceError(place, "one that answers", str(error), hint) from error
    if answer != struct.pack("<i", base.RPC_TRACKER_MAGIC):
        raise DeviceError(place, "a tracker of TVM's", "something else", hint)


def serve(
    listening: socket.socket, threads: int, *, tracker: Address | None = None, key: str = "", emulated: bool = False
) -> NoReturn:
    """Answers connections one after another, for ever, and offers itself to a tracker under `key`.

    `threads` is what a call uses. What goes wrong in a connection ends that connection, and one that does not say who
    it is keeps nobody waiting.
    """
    _load(threads, emulated)
    if tracker is not None:
        require_tracker(tracker)
    from tvm.rpc import server

    server.logger.setLevel(logging.WARNING)  # not a line for each connection
    home = os.getcwd()
    address, port = listening.getsockname()[:2]
    own_address = None if ip_address(address).is_unspecified else address  # or what the tracker sees
    with ReadyConnections(listening) as connections:
        while True:
            try:
                # The body of TVM's own server. It returns by an exception: when a connection's fork ended badly, when
                # the tracker stayed away for a minute, and at a handshake that is none.
                server._listen_loop(connections, port, key, tracker, None, own_address)
            except Exception as error:
                _LOG.info("%s", error)
            os.chdir(home)  # from that connection's folder, which is gone


def child(threads: int) -> NoReturn:
    """The server of one client on this machine: writes its port to stdout, and ends when its stdin does, however the
    client ended. To be started in a process group of its own."""
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    listening = bind()
    os.write(1, f"{listening.getsockname()[1]}\n".encode())
    os.dup2(2, 1)  # nobody reads on
    serve(listening, threads)


def _end_with_stdin() -> NoReturn:
    # Not sys.stdin, whose lock the forks would inherit.
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _load(threads: int, emulated: bool) -> None:
    """Loads TVM's runtime, by itself, and registers what connections find and what each fork has to do."""
    os.environ[environment.RUNTIME_ALONE] = "1"
    os.environ["TVM_NUM_THREADS"] = str(threads)  # of our pool, too
    runtime = tvm_runtime.start()
    tile_permission.refusal()  # asks; forks inherit what is granted, and who gets none says so in `mhsa.device`
    import multiprocessing

    multiprocessing.set_start_method("fork", force=True)  # connections inherit what is registered here
    runtime.ffi.register_global_func(DEVICE, lambda: _description(emulated), override=True)
    runtime.ffi.register_global_func(SECONDS, seconds, override=True)
    os.register_at_fork(after_in_child=_prepare_fork)


def _description(emulated: bool) -> str:
    """What this machine is, as JSON, asked in a connection's fork. What is loaded there may have kernels for a GPU, if
    there is one."""
    device = this_device(emulated, gpu=True)
    if device.gpu is not None:
        try:
            tvm_runtime.start_cuda()
        except InstallationError as error:
            _LOG.warning("%s", error)
            device = msgspec.structs.replace(device, gpu=None)
    return msgspec.json.encode(device).decode()


def _prepare_fork() -> None:
    """Makes a fork end with the server, and at a crash without a page of TVM's."""
    ctypes.CDLL(None).prctl(_ENDS_WITH_PARENT, signal.SIGKILL)
    signal.signal(
        signal.SIGSEGV, signal.SIG_DFL
    )  # TVM's handler prints a page; the server says what happened in a line
