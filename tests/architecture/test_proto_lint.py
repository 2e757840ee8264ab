"""The protobuf files follow buf's STANDARD rules (https://buf.build/docs/lint/rules/), checked on descriptors
under their buf names; each rule is shown to detect a file that violates it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

ROOT = Path(__file__).resolve().parents[2]

PASCAL = re.compile(r"^[A-Z][A-Za-z0-9]*$")
SNAKE = re.compile(r"^[a-z][a-z0-9]*(_[a-z0-9]+)*$")
UPPER = re.compile(r"^[A-Z][A-Z0-9]*(_[A-Z0-9]+)*$")
VERSION = re.compile(r"^v[1-9][0-9]*((alpha|beta)[1-9][0-9]*|p[1-9][0-9]*(alpha|beta)[1-9][0-9]*|test.*)?$")


def compile_protos(source: Path, names: Iterable[str], out: Path) -> list[FileDescriptorProto]:
    """Descriptors of `names` below `source`, in dependency order."""
    target = out / "set.pb"
    # A process of its own: protoc's library and NIXL's cannot be loaded into one.
    protoc = [sys.executable, "-m", "grpc_tools.protoc"]
    subprocess.run([*protoc, f"--proto_path={source}", f"--descriptor_set_out={target}", *names], check=True)
    return list(FileDescriptorSet.FromString(target.read_bytes()).file)


def lint(files: list[FileDescriptorProto]) -> list[str]:
    """Every violation as `RULE file: what`."""
    found: list[str] = []
    for file in files:
        found += [f"{rule} {file.name}: {what}" for rule, what in _file(file)]
    packages = {file.name: file.package for file in files}
    found += [f"{rule} {what}" for rule, what in _across(packages, files)]
    return found


def _file(file: FileDescriptorProto) -> Iterator[tuple[str, str]]:
    yield from _name_and_package(file)
    if file.syntax != "proto3":
        yield "SYNTAX_SPECIFIED", file.syntax or "proto2"
    if file.public_dependency:
        yield "IMPORT_NO_PUBLIC", str(list(file.public_dependency))
    if file.weak_dependency:
        yield "IMPORT_NO_WEAK", str(list(file.weak_dependency))
    for message in file.message_type:
        yield from _message(message)
    for enum in file.enum_type:
        yield from _enum(enum)
    for service in file.service:
        yield from _service(service)


def _name_and_package(file: FileDescriptorProto) -> Iterator[tuple[str, str]]:
    parts = file.package.split(".")
    directory, _, base = file.name.rpartition("/")
    if not file.package:
        yield "PACKAGE_DEFINED", "no package"
    if directory != "/".join(parts):
        yield "PACKAGE_DIRECTORY_MATCH", f"package {file.package} in folder {directory}"
    if not all(SNAKE.match(part) for part in parts):
        yield "PACKAGE_LOWER_SNAKE_CASE", file.package
    if not VERSION.match(parts[-1]):
        yield "PACKAGE_VERSION_SUFFIX", file.package
    if not SNAKE.match(base.removesuffix(".proto")):
        yield "FILE_LOWER_SNAKE_CASE", base


def _service(service: ServiceDescriptorProto) -> Iterator[tuple[str, str]]:
    if not PASCAL.match(service.name):
        yield "SERVICE_PASCAL_CASE", service.name
    if not service.name.endswith("Service"):
        yield "SERVICE_SUFFIX", service.name
    for method in service.method:
        yield from _method(service.name, method)


def _message(message: DescriptorProto) -> Iterator[tuple[str, str]]:
    if not PASCAL.match(message.name):
        yield "MESSAGE_PASCAL_CASE", message.name
    for field in message.field:
        if not SNAKE.match(field.name):
            yield "FIELD_LOWER_SNAKE_CASE", f"{message.name}.{field.name}"
        if field.label == field.LABEL_REQUIRED:
            yield "FIELD_NOT_REQUIRED", f"{message.name}.{field.name}"
    for oneof in message.oneof_decl:
        # protoc invents a oneof named _field for each optional field.
        if not SNAKE.match(oneof.name.removeprefix("_")):
            yield "ONEOF_LOWER_SNAKE_CASE", f"{message.name}.{oneof.name}"
    for nested in message.nested_type:
        if not nested.options.map_entry:
            yield from _message(nested)
    for enum in message.enum_type:
        yield from _enum(enum)


def _enum(enum: EnumDescriptorProto) -> Iterator[tuple[str, str]]:
    prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper() + "_"
    if not PASCAL.match(enum.name):
        yield "ENUM_PASCAL_CASE", enum.name
    if enum.options.allow_alias:
        yield "ENUM_NO_ALLOW_ALIAS", enum.name
    if enum.value[0].number != 0:
        yield "ENUM_FIRST_VALUE_ZERO", f"{enum.name}.{enum.value[0].name}"
    for value in enum.value:
        if not UPPER.match(value.name):
            yield "ENUM_VALUE_UPPER_SNAKE_CASE", f"{enum.name}.{value.name}"
        if not value.name.startswith(prefix):
            yield "ENUM_VALUE_PREFIX", f"{enum.name}.{value.name}"
        if value.number == 0 and not value.name.endswith("_UNSPECIFIED"):
            yield "ENUM_ZERO_VALUE_SUFFIX", f"{enum.name}.{value.name}"


def _method(service: str, method: MethodDescriptorProto) -> Iterator[tuple[str, str]]:
    name = f"{service}.{method.name}"
    if not PASCAL.match(method.name):
        yield "RPC_PASCAL_CASE", name
    for given, suffix, rule in (
        (method.input_type, "Request", "RPC_REQUEST_STANDARD_NAME"),
        (method.output_type, "Response", "RPC_RESPONSE_STANDARD_NAME"),
    ):
        allowed = {f"{method.name}{suffix}", f"{service}{method.name}{suffix}"}
        if given.rsplit(".", 1)[-1] not in allowed:
            yield rule, f"{name}: {given}"


def _across(packages: dict[str, str], files: list[FileDescriptorProto]) -> Iterator[tuple[str, str]]:
    by_directory: dict[str, set[str]] = {}
    by_package: dict[str, set[str]] = {}
    for name, package in packages.items():
        directory = name.rpartition("/")[0]
        by_directory.setdefault(directory, set()).add(package)
        by_package.setdefault(package, set()).add(directory)
    for directory, found in by_directory.items():
        if len(found) > 1:
            yield "DIRECTORY_SAME_PACKAGE", f"{directory}: {sorted(found)}"
    for package, places in by_package.items():
        if len(places) > 1:
            yield "PACKAGE_SAME_DIRECTORY", f"{package}: {sorted(places)}"
    yield from _rpc_types_unique(files)
    for file in files:
        yield from _unused_imports(file, files)
    yield from _import_cycles(packages, files)


def _rpc_types_unique(files: list[FileDescriptorProto]) -> Iterator[tuple[str, str]]:
    used: dict[str, str] = {}
    for file in files:
        for service in file.service:
            for method in service.method:
                for name in (method.input_type, method.output_type):
                    place = f"{service.name}.{method.name}"
                    if name in used:
                        yield "RPC_REQUEST_RESPONSE_UNIQUE", f"{name}: {used[name]} and {place}"
                    used[name] = place


def _unused_imports(file: FileDescriptorProto, files: list[FileDescriptorProto]) -> Iterator[tuple[str, str]]:
    referred = set(_references(file))
    for dependency in file.dependency:
        for other in files:
            names = {f".{other.package}.{one.name}" for one in other.message_type}
            names |= {f".{other.package}.{one.name}" for one in other.enum_type}
            if other.name == dependency and not any(
                ref == name or ref.startswith(name + ".") for ref in referred for name in names
            ):
                yield "IMPORT_USED", f"{file.name}: {dependency}"


def _references(file: FileDescriptorProto) -> Iterator[str]:
    def of(message: DescriptorProto) -> Iterator[str]:
        yield from (field.type_name for field in message.field if field.type_name)
        for nested in message.nested_type:
            yield from of(nested)

    for message in file.message_type:
        yield from of(message)
    for service in file.service:
        for method in service.method:
            yield from (method.input_type, method.output_type)


def _import_cycles(packages: dict[str, str], files: list[FileDescriptorProto]) -> Iterator[tuple[str, str]]:
    imports: dict[str, set[str]] = {}
    for file in files:
        targets = {packages[d] for d in file.dependency if d in packages} - {file.package}
        imports.setdefault(file.package, set()).update(targets)
    for package, direct in imports.items():
        reached, frontier = set[str](), set(direct)
        while frontier:
            reached |= frontier
            frontier = set().union(*(imports.get(one, set()) for one in frontier)) - reached
        if package in reached:
            yield "PACKAGE_NO_IMPORT_CYCLE", package


def test_the_contract_follows_bufs_standard_rules(tmp_path: Path) -> None:
    names = [str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").rglob("*.proto")]
    files = compile_protos(ROOT / "proto", names, tmp_path)
    assert sorted(file.name for file in files) == sorted(names)
    assert lint(files) == []


GOOD = """syntax = "proto3";
package acme.v1;
enum Color { COLOR_UNSPECIFIED = 0; COLOR_DEEP_RED = 1; }
message Paint { optional Color color = 1; oneof kind { string oil = 2; bytes water = 3; } }
message MixRequest { Paint paint = 1; map<string, int32> parts = 2; }
message MixResponse {}
service PaintService { rpc Mix(MixRequest) returns (stream MixResponse); }
"""
HEAD = 'syntax = "proto3"; package acme.v1; '
BAD = {
    "PACKAGE_DEFINED": ("acme/v1/a.proto", 'syntax = "proto3"; message A {}'),
    "PACKAGE_DIRECTORY_MATCH": ("acme/v2/a.proto", HEAD),
    "PACKAGE_LOWER_SNAKE_CASE": ("Acme/v1/a.proto", 'syntax = "proto3"; package Acme.v1;'),
    "PACKAGE_VERSION_SUFFIX": ("acme/a.proto", 'syntax = "proto3"; package acme;'),
    "FILE_LOWER_SNAKE_CASE": ("acme/v1/BadName.proto", HEAD),
    "SYNTAX_SPECIFIED": ("acme/v1/a.proto", 'syntax = "proto2"; package acme.v1;'),
    "FIELD_NOT_REQUIRED": (
        "acme/v1/a.proto",
        'syntax = "proto2"; package acme.v1; message A { required int32 b = 1; }',
    ),
    "MESSAGE_PASCAL_CASE": ("acme/v1/a.proto", HEAD + "message a_b {}"),
    "FIELD_LOWER_SNAKE_CASE": ("acme/v1/a.proto", HEAD + "message A { int32 badName = 1; }"),
    "ONEOF_LOWER_SNAKE_CASE": ("acme/v1/a.proto", HEAD + "message A { oneof Kind { int32 b = 1; } }"),
    "ENUM_PASCAL_CASE": ("acme/v1/a.proto", HEAD + "enum a_b { A_B_UNSPECIFIED = 0; }"),
    "ENUM_NO_ALLOW_ALIAS": (
        "acme/v1/a.proto",
        HEAD + "enum A { option allow_alias = true; A_UNSPECIFIED = 0; A_B = 1; A_C = 1; }",
    ),
    "ENUM_FIRST_VALUE_ZERO": (
        "acme/v1/a.proto",
        'syntax = "proto2"; package acme.v1; enum A { A_B = 1; A_UNSPECIFIED = 0; }',
    ),
    "ENUM_VALUE_UPPER_SNAKE_CASE": ("acme/v1/a.proto", HEAD + "enum A { A_UNSPECIFIED = 0; A_b = 1; }"),
    "ENUM_VALUE_PREFIX": ("acme/v1/a.proto", HEAD + "enum A { A_UNSPECIFIED = 0; B = 1; }"),
    "ENUM_ZERO_VALUE_SUFFIX": ("acme/v1/a.proto", HEAD + "enum A { A_NONE = 0; }"),
    "SERVICE_PASCAL_CASE": ("acme/v1/a.proto", HEAD + "service bad_Service {}"),
    "SERVICE_SUFFIX": ("acme/v1/a.proto", HEAD + "service Dye {}"),
    "RPC_PASCAL_CASE": (
        "acme/v1/a.proto",
        HEAD + "message R {} message S {} service AService { rpc do_it(R) returns (S); }",
    ),
    "RPC_REQUEST_STANDARD_NAME": (
        "acme/v1/a.proto",
        HEAD + "message R {} message DyeResponse {} service AService { rpc Dye(R) returns (DyeResponse); }",
    ),
    "RPC_RESPONSE_STANDARD_NAME": (
        "acme/v1/a.proto",
        HEAD + "message R {} message DyeRequest {} service AService { rpc Dye(DyeRequest) returns (R); }",
    ),
    "RPC_REQUEST_RESPONSE_UNIQUE": (
        "acme/v1/a.proto",
        HEAD + "message R {} service AService { rpc Mix(R) returns (R); }",
    ),
    "IMPORT_USED": ("acme/v1/a.proto", HEAD + 'import "acme/v1/good.proto"; message A {}'),
    "IMPORT_NO_PUBLIC": (
        "acme/v1/a.proto",
        HEAD + 'import public "acme/v1/good.proto"; message A { Paint p = 1; }',
    ),
    "DIRECTORY_SAME_PACKAGE": ("acme/v1/a.proto", 'syntax = "proto3"; package other.v1;'),
    "PACKAGE_SAME_DIRECTORY": ("acme/other/a.proto", HEAD),
}


def test_a_sound_file_breaks_no_rule(tmp_path: Path) -> None:
    (tmp_path / "acme/v1").mkdir(parents=True)
    (tmp_path / "acme/v1/good.proto").write_text(GOOD)
    assert lint(compile_protos(tmp_path, ["acme/v1/good.proto"], tmp_path)) == []


@pytest.mark.parametrize("rule", BAD)
def test_a_file_that_breaks_a_rule_is_caught(rule: str, tmp_path: Path) -> None:
    name, text = BAD[rule]
    for path, content in (("acme/v1/good.proto", GOOD), (name, text)):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    found = lint(compile_protos(tmp_path, ["acme/v1/good.proto", name], tmp_path))
    assert rule in {violation.split()[0] for violation in found}


def test_packages_that_import_each_other_are_caught() -> None:
    files = [
        FileDescriptorProto(name="a/v1/a.proto", package="a.v1", dependency=["b/v1/b.proto"]),
        FileDescriptorProto(name="b/v1/b.proto", package="b.v1", dependency=["a/v1/c.proto"]),
        FileDescriptorProto(name="a/v1/c.proto", package="a.v1", weak_dependency=[0]),
    ]
    rules = {violation.split()[0] for violation in lint(files)}
    assert {"PACKAGE_NO_IMPORT_CYCLE", "IMPORT_NO_WEAK"} <= rules
