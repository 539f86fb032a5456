"""List, merge, promote and check files of tuned records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mhsa_compile.cli.common import options, output
from mhsa_compile.cli.common.sources import read_records
from mhsa_compile.errors import RecordsError, did_you_mean
from mhsa_compile.files import places

if TYPE_CHECKING:
    from mhsa_compile.records.record import Record

_BUCKETS = ("rows", "batch", "q_length", "kv_length")  # the keys of op_key that are lengths
File = Annotated[Path, typer.Argument(metavar="FILE", help="A file of records.")]


def list_(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="A file of records.")] = None,
    *,
    target: Annotated[
        str | None, typer.Option(help="All records that compiling for it reads; native if neither is given.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Show the records of a file, or those that compiling for a target reads, and which of them do not fit it."""
    from mhsa_compile.hardware.profile import NATIVE, load_profile
    from mhsa_compile.records.record import why_not_on

    if file is not None and target is not None:
        raise RecordsError("FILE", "a file or --target", f"{file} and --target {target}", "Leave one of them out.")
    profile = None if file is not None else load_profile(target or NATIVE)
    files = [file] if file is not None else load_profile(target or NATIVE).records()
    by_file = {path: read_records([path]) for path in files}
    if json:
        rows = [
            {"file": path, "misfit": profile and why_not_on(record, profile), "record": record}
            for path, records in by_file.items()
            for record in records
        ]
        output.print_json(rows)
        return
    for path, records in by_file.items():
        title = f"{path}: {len(records)} records"
        _show(
            title, "does not fit" if profile else "", ((r, (profile and why_not_on(r, profile)) or "") for r in records)
        )
    if not by_file and profile is not None:
        output.line(f"No records of {profile.name} are shipped, and none at {profile.own_records()}")


def merge(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files of records.")],
    *,
    out: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Where to; what it holds already takes part.")
    ],
    json: options.Json = False,
) -> None:
    """Keep the fastest right record of each operation, number of threads, ISA and device in one file."""
    from mhsa_compile.records import record_files

    by_file = {path: read_records([path]) for path in files}
    best = record_files.merge_into(out, [record for records in by_file.values() for record in records])
    if json:
        output.print_json({"file": out, "records": len(best), "read": {str(p): len(r) for p, r in by_file.items()}})
        return
    output.line(f"{out}: {len(best)} records, of {sum(map(len, by_file.values()))} in {len(by_file)} files")


def promote(
    file: File,
    *,
    target: Annotated[
        str | None, typer.Option(help="Whose records they become; by default FILE's name says it.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Copy the best records of a file to those that are shipped for a target; exit 1 if an operation's are all refused.

    Refused is what is wrong, slower than the default, unsteady, emulated, of another ISA or microarchitecture, or
    measured by a library that is in no commit.
    """
    from mhsa_compile.hardware import data_paths
    from mhsa_compile.hardware.profile import load_profile
    from mhsa_compile.records import record_files
    from mhsa_compile.records.record import identity, why_doubtful, why_not_on

    records = read_records([file])
    name = _shipped_target(target or file.stem, records)
    profile = load_profile(name)
    reasons = [(record, why_not_on(record, profile) or why_doubtful(record)) for record in records]
    fine = [record for record, reason in reasons if reason is None]
    refusals = [(record, reason) for record, reason in reasons if reason is not None]
    place = data_paths.shipped_records(name)
    before = record_files.read(place).records if places.is_file(place) else ()
    own = record_files.merge_into(place, fine) if fine else list(before)
    losses = {identity(record) for record, _ in refusals} - {identity(record) for record in own}
    merged_records = [record for record in own if record not in before]
    if json:
        report = [{"reason": reason, "record": record} for record, reason in refusals]
        output.print_json({"file": place, "promoted": len(merged_records), "records": len(own), "refused": report})
    else:
        _show(f"{place}: {len(merged_records)} records promoted", "", ((record, "") for record in merged_records))
        if refusals:
            _show(f"{len(refusals)} records refused", "because", refusals)
    if losses:
        raise typer.Exit(1)


def check(
    file: File,
    *,
    repair: Annotated[
        bool, typer.Option("--repair", help="Move what is no record to FILE.rejected, and keep the rest.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Name every line that is no record; exit 1 if there is one and it stays."""
    from mhsa_compile.records import record_files

    records, flaws = record_files.examine(file)
    target = file.with_name(f"{file.name}.rejected")
    if repair and flaws:
        flaws = record_files.repair(file, target)
    messages = [(flaw.number, "torn: its writer died" if flaw.error is None else flaw.error.got) for flaw in flaws]
    aside = target if repair and flaws else None
    if json:
        lines = [{"line": number, "reason": reason} for number, reason in messages]
        output.print_json({"file": file, "records": len(records), "no_records": lines, "rejected": aside})
    else:
        output.print_table(
            f"{file}: {len(records)} records, {len(messages)} other lines", ("line>", "what it is"), messages
        )
        if aside is not None:
            output.line(f"The other lines are in {aside}")
    if flaws and not repair:
        raise typer.Exit(1)


def measured_on(
    file: File,
    microarchitecture: Annotated[
        str, typer.Argument(metavar="MICROARCHITECTURE", help="Such as zen5; `mhsa doctor` names that of this machine.")
    ],
    *,
    cpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of the records of this CPU's marketing name alone.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Say on which microarchitecture the records of a file were measured that do not tell: those from before records
    said so. Without it a target that states its microarchitecture does not use them."""
    from mhsa_compile.hardware import host
    from mhsa_compile.hardware.microarchitecture import names
    from mhsa_compile.records import record_files

    choices = {*names(), host.microarchitecture_name()} - {host.UNKNOWN}
    if microarchitecture not in choices:
        hint = did_you_mean(microarchitecture, choices, f"This machine is {host.microarchitecture_name()}.", most=3)
        raise RecordsError("MICROARCHITECTURE", "the name of one", repr(microarchitecture), hint)
    if record_files.read(file).torn:
        output.line(f"Warning: records {str(file)!r}: the last line is torn, and left out", err=True)
    count = record_files.state_microarchitecture(file, microarchitecture, cpu)
    if json:
        output.print_json({"file": file, "microarchitecture": microarchitecture, "records": count})
    else:
        output.line(f"{file}: {count} records were measured on {microarchitecture}")


def _shipped_target(name: str, records: Iterable[Record]) -> str:
    """The name, if records can be shipped for it. Raises RecordsError for one that is no file of targets/."""
    from mhsa_compile.hardware.profile import NATIVE, load_profile, profile_names, shipped_name
    from mhsa_compile.records.record import why_not_on

    if (file_name := shipped_name(name)) is not None:
        return file_name
    profiles = map(load_profile, (file_name for file_name in profile_names() if file_name != NATIVE))
    fitting = [profile.name for profile in profiles if not any(why_not_on(record, profile) for record in records)]
    hint = f"State one, such as --target {fitting[-1]}: all of them fit {', '.join(fitting)}." if fitting else ""
    raise RecordsError("--target", "a target that is shipped", repr(name), hint or "`mhsa targets` lists them.")


def _operation(record: Record) -> str:
    """What is fixed about a record's operation: widths, heads, dtype."""
    values = {name: value for name, value in record.key.items() if isinstance(value, int | str) and value}
    return f"{record.op} {output.assignments({n: v for n, v in values.items() if n not in _BUCKETS})}".rstrip()


def _lengths(record: Record) -> str:
    """The sizes at which a record was measured, and whether it is for code that serves any length."""
    symbolic = any(record.key.get(name) == "any" for name in _BUCKETS)
    return output.assignments(record.sizes) + (", for any" if symbolic else "")


def _show(title: str, last: str, rows: Iterable[tuple[Record, Any]]) -> None:
    """A table of records, with one more column."""
    from mhsa_compile.records.record import share_of_default

    columns = ("operation", "lengths", "kernel", "config", "us>", "vs default>", "threads>", "device", "date", last)
    cells = (
        (_operation(r), _lengths(r), r.kernel, output.assignments(r.config), f"{r.median_us:,.2f}",
         f"{1 / share_of_default(r):.2f} x", r.threads, f"{r.device.name}{', emulated' if r.device.emulated else ''}",
         r.date[:10], more)
        for r, more in rows
    )  # fmt: skip
    output.print_table(title, columns if last else columns[:-1], (cell if last else cell[:-1] for cell in cells))


COMMANDS: dict[str, Callable[..., None]] = {
    "list": list_,
    "merge": merge,
    "promote": promote,
    "check": check,
    "measured-on": measured_on,
}
