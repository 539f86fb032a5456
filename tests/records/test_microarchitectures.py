"""Records serve the microarchitecture that they were measured on, whatever the marketing name."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from support.command import mhsa, refused
from support.pretended_cpu import CPUS, pretend
from support.records_made import DEVICE, made

from mhsa_compile.cli.commands import tune_view
from mhsa_compile.errors import RecordsError
from mhsa_compile.hardware import data_paths
from mhsa_compile.hardware.profile import TargetProfile, detect, load_profile
from mhsa_compile.records import record_files
from mhsa_compile.records.device import Device
from mhsa_compile.records.record import (
    FORMAT,
    Record,
    RecordSet,
    does_not_tell,
    encoded,
    for_record,
    isa_of,
    why_doubtful,
    why_not_on,
)
from mhsa_compile.tuning.measure import rpc_server

EPYC = Device(cpu="AMD EPYC", cores=2, architecture="x86_64", l1d_kib=32, l2_kib=1024)


def native(monkeypatch: pytest.MonkeyPatch, name: str) -> TargetProfile:
    pretend(monkeypatch, name)
    return detect()


def measured_here(monkeypatch: pytest.MonkeyPatch, name: str) -> Record:
    """What tuning for `native` writes on one of CPUS."""
    profile = native(monkeypatch, name)
    return made(isa=isa_of(profile), device=for_record(rpc_server.this_device(), profile))


@pytest.mark.parametrize("here", CPUS)
@pytest.mark.parametrize("there", CPUS)
def test_a_record_of_one_is_not_taken_on_another(monkeypatch: pytest.MonkeyPatch, there: str, here: str) -> None:
    record = measured_here(monkeypatch, there)
    assert (record.device.cpu, record.device.microarchitecture) == (CPUS[there][4], there)
    profile = native(monkeypatch, here)
    # Of the same instructions: what is left is the microarchitecture alone.
    alike = msgspec.structs.replace(record, isa=isa_of(profile))
    candidates, reason = RecordSet([alike], profile).candidates(record.op, record.key)
    assert (candidates == [alike]) == (there == here)
    assert reason == ("" if there == here else f"measured on {there}, not {here}")


def test_what_is_shipped_is_for_a_zen_5(monkeypatch: pytest.MonkeyPatch) -> None:
    fitting = {}
    for name in CPUS:
        profile = native(monkeypatch, name)
        records, warnings = record_files.gather(data_paths.records_for("native")[-3:])
        assert not warnings and all(record.format == FORMAT for record in records)
        fitting[name] = sum(why_not_on(record, profile) is None for record in records)
    assert fitting.pop("zen5") > 0 and not any(fitting.values())
    assert {record.device.microarchitecture for record in records} == {"zen5"}


def test_a_target_for_many_takes_the_records_of_all() -> None:
    profile = load_profile("x86-64-v4")
    records = [made(device=msgspec.structs.replace(DEVICE, microarchitecture=name)) for name in ("zen4", "zen5", "")]
    assert RecordSet(records, profile).candidates("linear", made().key) == (records, "")


@pytest.mark.parametrize("emulated", [False, True])
def test_an_old_record_is_none_of_a_target_that_states_its_microarchitecture(emulated: bool) -> None:
    old = made("znver4", device=msgspec.structs.replace(EPYC, emulated=emulated), format=1)
    reason = (
        "measured on 'AMD EPYC', a name that does not tell the microarchitecture, here zen4: `mhsa records measured-on`"
    )
    assert does_not_tell(old) and reason in str(why_not_on(old, load_profile("znver4")))
    assert "measured-on" in str(why_doubtful(made(device=EPYC, format=1, versions={})))
    assert why_not_on(made(device=EPYC, format=1), load_profile("x86-64-v4")) is None


def test_an_old_record_of_an_arm_cpu_tells_by_its_numbers() -> None:
    board = Device(cpu="implementer 0x41 part 0xd0c", cores=4, architecture="aarch64")
    old = made("neoverse-n1", device=board, format=1)
    assert not does_not_tell(old) and why_not_on(old, load_profile("neoverse-n1")) is None
    other = made("cortex-a76", device=board, format=1)
    assert why_not_on(other, load_profile("cortex-a76")) == "measured on neoverse-n1, not cortex-a76"


def test_a_device_that_does_not_tell_is_what_its_target_says() -> None:
    assert for_record(EPYC, load_profile("znver4")).microarchitecture == "zen4"
    assert for_record(EPYC, load_profile("x86-64-v4")).microarchitecture == ""
    told = msgspec.structs.replace(EPYC, microarchitecture="zen5")
    assert for_record(told, load_profile("znver4")).microarchitecture == "zen5"


def old_file(path: Path, *records: Record) -> Path:
    """As the library before this wrote it: no word of the microarchitecture."""
    lines = []
    for record in records:
        fields = json.loads(encoded(msgspec.structs.replace(record, format=1)))
        if not fields["device"]["microarchitecture"]:
            del fields["device"]["microarchitecture"]
        lines.append(json.dumps(fields, separators=(",", ":")))
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_old_records_are_read_with_a_word_and_can_be_told_where_they_were_measured(tmp_path: Path) -> None:
    new = made("znver4", op="attention")
    path = old_file(tmp_path / "old.jsonl", made("znver4", device=EPYC), made("znver4", device=EPYC, threads=2), new)
    _, warnings = record_files.gather([path])
    assert len(warnings) == 1 and "2 do not tell the microarchitecture" in warnings[0] and "measured-on" in warnings[0]
    told = json.loads(mhsa("records", "measured-on", path, "zen4", "--json").stdout)
    assert told == {"file": str(path), "microarchitecture": "zen4", "records": 2}
    first, second, third = record_files.read(path).records
    assert first == made("znver4", device=msgspec.structs.replace(EPYC, microarchitecture="zen4"))
    assert second.device.microarchitecture == "zen4"
    assert third == msgspec.structs.replace(new, format=1)  # it told already, and is as it was
    assert record_files.gather([path])[1] == []
    assert why_not_on(first, load_profile("znver4")) is None
    assert "0 records" in mhsa("records", "measured-on", path, "zen5").stdout.replace("\n", " ")


def test_records_of_several_devices_are_told_one_by_one(tmp_path: Path) -> None:
    other = msgspec.structs.replace(EPYC, cpu="Intel(R) Xeon(R)")
    path = old_file(tmp_path / "old.jsonl", made(device=EPYC), made(device=other))
    before = path.read_bytes()
    message = refused(mhsa("records", "measured-on", path, "zen4"))
    assert "--cpu" in message and "AMD EPYC" in message and "Xeon" in message
    assert path.read_bytes() == before
    assert mhsa("records", "measured-on", path, "zen4", "--cpu", "AMD EPYC").exit_code == 0
    assert [record.device.microarchitecture for record in record_files.read(path).records] == ["zen4", ""]
    caches = old_file(
        tmp_path / "more.jsonl", made(device=EPYC), made(device=msgspec.structs.replace(EPYC, l1d_kib=48))
    )
    with pytest.raises(RecordsError, match="caches of several"):
        record_files.state_microarchitecture(caches, "zen4", "AMD EPYC")


def test_bad_names_and_files_are_refused(tmp_path: Path) -> None:
    path = old_file(tmp_path / "old.jsonl", made(device=EPYC))
    assert "Did you mean 'zen" in refused(mhsa("records", "measured-on", path, "zen44"))
    assert "This machine is" in refused(mhsa("records", "measured-on", path, "AMD EPYC"))
    assert "unknown" in refused(mhsa("records", "measured-on", path, "unknown"))
    assert "absent.jsonl" in refused(mhsa("records", "measured-on", tmp_path / "absent.jsonl", "zen4"))
    path.write_text("my notes\n")
    assert "line 1" in refused(mhsa("records", "measured-on", path, "zen4"))
    assert path.read_text() == "my notes\n"


def test_tuning_says_what_measures_and_warns_where_nobody_would_use_it(capsys: pytest.CaptureFixture[str]) -> None:
    zen5 = msgspec.structs.replace(EPYC, microarchitecture="zen5")
    for device, target in ((zen5, "znver5"), (zen5, "x86-64-v4"), (EPYC, "znver4")):
        tune_view.show_device(device, load_profile(target))
        assert capsys.readouterr().err == f"measured on {device.name}\n"
    tune_view.show_device(zen5, load_profile("znver4"))
    words = capsys.readouterr().err
    assert "measured on AMD EPYC (zen5)\n" in words and "Warning: measured on zen5, not zen4" in words
    assert "compiling for znver4 will not use these records" in words
