"""`mhsa bundle`, an artifact for a device without Python; `mhsa serve` and `mhsa measure`, this machine as a device
that measures, over a network and without one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mhsa_compile.cli.common import options, output
from mhsa_compile.errors import OutputError
from mhsa_compile.files import places

if TYPE_CHECKING:
    from mhsa_compile.tuning.measure.work_results import Results


_PORT = 9090  # that of TVM's own server


def bundle(
    artifact: options.ArtifactFolder,
    *,
    out: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="The bundle's folder.")],
    runtime: Annotated[
        str | None,
        typer.Option(
            metavar="build|PATH",
            help="TVM's runtime for the target: built here with Zig, or in a wheel, or in a folder of wheels or "
            "libraries. By default what is installed, and for another architecture: build.",
        ),
    ] = None,
    build: Annotated[bool, typer.Option("--build", help="Compile the program, too, with Zig.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the bundle if it exists.")] = False,
    json: options.Json = False,
) -> None:
    """Gather an artifact, TVM's runtime for its target and a C++ program that runs it, for a device without Python.

    Of an artifact for WebAssembly (--target wasm32) it is an ES module, with all that this fetches.
    """
    from mhsa_compile.runtime.artifact.artifact import Artifact
    from mhsa_compile.runtime.standalone import bundle as standalone
    from mhsa_compile.runtime.standalone import templates

    standalone.check_folder(places.resolve(out, OutputError, "-o"), force)
    opened = Artifact.open(artifact)
    with output.stages() as stage:
        result = standalone.bundle(opened, out, runtime=runtime, build=build, force=force, progress=stage)
    if json:
        output.print_json({"bundle": out, "bytes": result.bytes, "sizes": result.sizes, "runtime": result.runtime})
        return
    rows = ((name, f"{size / 1e6:.2f}") for name, size in result.sizes.items())
    title = f"{out} for {opened.manifest.target.name}: {result.bytes / 1e6:.1f} MB, the runtime from {result.runtime}"
    output.print_table(title, ("part", "MB>"), rows)
    if not result.command:
        output.line(f'In a page, or in Node: import {{ load }} from "./{out.name}/attention.js"')
        return
    output.line(
        f"On the device: ./{templates.PROGRAM}" if build else f"Compile its program: cd {out} && {result.command}"
    )


def serve(
    *,
    tracker: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Offer this machine to a tracker.")] = None,
    key: Annotated[str, typer.Option(metavar="NAME", help="The tracker's name for devices like this one.")] = "",
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen. Beyond loopback: trusted networks only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="The port; 0 is any that is free.")] = _PORT,
    threads: options.Threads = None,
    emulated: Annotated[
        bool, typer.Option("--emulated", help="Say that an emulator runs this: its times are none.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Measure on this machine for others, until Ctrl-C: TVM's RPC server, which survives what it runs.

    TVM's RPC asks for no password and runs what it is sent: whoever reaches the port can do anything that you can.
    So it listens on loopback, unless --host is given. Give it on trusted networks only.
    """
    from mhsa_compile.errors import DeviceError
    from mhsa_compile.hardware import host as machine
    from mhsa_compile.tuning.measure import rpc_server

    place = rpc_server.parsed(tracker, "--tracker") if tracker else None
    if (place is None) != (not key):
        raise DeviceError("--tracker and --key", "both, or neither", f"--tracker {tracker or ''} --key {key}")
    if place is not None and rpc_server.is_loopback(host) and not rpc_server.is_loopback(place[0]):
        hint = "Name this machine's address in that network: --host."
        raise DeviceError("--host", "an address that others in the tracker's network reach", repr(host), hint)
    count = machine.thread_count(threads)
    listening = rpc_server.bind(host, port)
    device = rpc_server.this_device(emulated)
    if json:
        output.print_json({"host": host, "port": listening.getsockname()[1], "threads": count, "device": device})
    else:
        where = f"at {host}:{listening.getsockname()[1]}"
        output.line(f"{device.cpu} ({device.microarchitecture}, {device.architecture}), {count} threads, {where}")
        output.line("Ctrl-C ends it.", err=True)
    if not rpc_server.is_loopback(host):
        typer.secho(
            "TVM's RPC asks for no password: whoever reaches this port can run anything here.", fg="yellow", err=True
        )
    try:
        rpc_server.serve(listening, count, tracker=place, key=key, emulated=emulated)
    except KeyboardInterrupt:
        output.line("Stopped.", err=True)


def measure(
    work: Annotated[Path, typer.Argument(metavar="WORK.zip", help="What `mhsa tune --on bundle` wrote.")],
    *,
    out: Annotated[Path, typer.Option("-o", "--output", metavar="RESULTS.json", help="Where results go.")],
    json: options.Json = False,
) -> None:
    """Measure a bundle of candidates on this machine; begun again with the same -o, it goes on where it was."""
    from mhsa_compile.hardware import environment

    # Nothing here compiles; whoever called this command has the environment that they had.
    with environment.variable(environment.RUNTIME_ALONE, "1"), output.counter("measure") as count:
        from mhsa_compile.tuning.measure import work_results

        results = work_results.measure(work, out, lambda now: count(len(now.measured), now.total, _last(now)))
    tasks = work_results.summary(results)
    if json:
        trials, failures = sum(task.trials for task in tasks), sum(task.failures for task in tasks)
        report = {"trials": trials, "failures": failures, "tasks": tasks, "device": results.device, "saved": out}
        output.print_json(report)
        return
    rows = (
        (
            task.task,
            task.trials,
            task.failures,
            *map(_microseconds, (task.default_us, task.best_us)),
            _times(task.speedup),
        )
        for task in tasks
    )
    columns = ("operation", "candidates>", "failed>", "default us>", "best us>", "speedup>")
    output.print_table(f"{results.device.name}, {results.order.threads} threads: {out}", columns, rows)


def _last(results: Results) -> str:
    return results.measured[-1].task if results.measured else ""


def _microseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
