"""Loading: nothing happens at import, the first op loads the library, a failure can be repeated.

Each check has a process of its own, since a library is loaded once per process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import z3ext
from z3ext import _build, _library

OPS = {
    *("flat_overflow", "flat_overflow_", "pack_", "pack_rows_", "unpack_", "segment_check"),
    *("unscale_", "all_reduce_", "reduce_scatter_", "first_node_hook"),
}


def run(code: str, reference: bool = True) -> str:
    """Standard output of Python code in a new process, which must end well."""
    path = [str(Path(z3ext.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **{name: value for name, value in os.environ.items() if name != "Z3EXT_REFERENCE"},
        **({"Z3EXT_REFERENCE": "1"} if reference else {}),
        "PYTHONPATH": os.pathsep.join(path),
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,  # the first one may have to compile the library
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(params=["native", "reference"])
def reference(request: pytest.FixtureRequest) -> bool:
    if request.param == "native" and os.environ.get("Z3EXT_REFERENCE") == "1":
        pytest.skip("Z3EXT_REFERENCE=1: the reference stands in for the native library")
    return bool(request.param == "reference")


def test_import_and_inspection_do_nothing() -> None:
    run(
        """
        import copy, inspect, sys, threading, torch

        events = []
        def watch(event, arguments):
            if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "os.system"):
                events.append((event, arguments))
            if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax"):
                if not str(arguments[0]).partition(".")[2].startswith("cpython"):  # bytecode
                    events.append((event, arguments))
        sys.addaudithook(watch)
        threads = threading.active_count()

        import z3ext

        ns = torch.ops.z3ext
        assert type(ns).__name__ == "_LazyNamespace"
        for name in ("__wrapped__", "__file__", "__path__", "__torch_function__", "__len__"):
            assert not hasattr(ns, name), name
        for look in (repr, dir, inspect.getmembers, inspect.unwrap, inspect.getdoc):
            look(ns)
        for copied in (copy.copy, copy.deepcopy):
            try:
                copied(ns)
            except TypeError:
                pass
        assert z3ext.is_patched() is False
        z3ext.unpatch_deepspeed()
        assert not torch.ops.loaded_libraries, torch.ops.loaded_libraries
        assert not z3ext._library._loaded
        assert torch.ops.z3ext is ns
        loaded = [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]
        assert not loaded, loaded
        assert "z3ext.deepspeed" not in sys.modules
        assert not torch.cuda.is_initialized()
        assert threading.active_count() == threads
        assert not events, events
        """
    )


def test_private_names_do_not_load() -> None:
    """Notebooks and test tools ask any object for such names when they show it."""
    run(
        """
        import torch, z3ext

        for name in ("_repr_html_", "_ipython_display_", "_pytestfixturefunction"):
            hasattr(torch.ops.z3ext, name)
        assert not z3ext._library._loaded
        """
    )


@pytest.mark.parametrize(
    ("asked", "rank", "told"),
    [("bogus", None, True), ("AVX2", "0", True), ("bogus", "1", False), ("plain", None, False)],
)
def test_kernels_that_are_not_there(
    asked: str, rank: str | None, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("Z3EXT_CPU_CAPABILITY", asked)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    code = """
        import os, sys, torch, z3ext
        os.dup2(1, 2)
        assert torch.ops.z3ext.flat_overflow(torch.tensor([torch.inf])).item()
    """
    said = [line for line in run(code, reference=False).splitlines() if "CAPABILITY" in line]
    assert len(said) == told
    if told:
        assert f"Z3EXT_CPU_CAPABILITY is '{asked}'; expected plain, or avx2 or avx512" in said[0]


def test_the_reference_says_that_it_serves() -> None:
    code = """
        import logging, sys, torch, z3ext
        logging.basicConfig(stream=sys.stdout)
        torch.ops.z3ext.flat_overflow(torch.zeros(1))
    """
    assert "Z3EXT_REFERENCE=1: plain torch serves, slowly" in run(code)


def test_first_op_loads(reference: bool) -> None:
    run(
        """
        import torch, z3ext

        stand_in = torch.ops.z3ext
        assert not hasattr(torch.ops.z3ext, "no_such_op")
        assert z3ext._library._loaded
        assert isinstance(torch.ops.z3ext, torch._ops._OpNamespace)
        try:
            torch.ops.z3ext.no_such_op
        except AttributeError as error:
            assert "no_such_op" in str(error), error
        else:
            raise AssertionError("no AttributeError")
        op = torch.ops.z3ext.flat_overflow
        assert stand_in.flat_overflow is op
        assert op(torch.tensor([1.0, torch.inf])).item() is True
        z3ext._library.load()
        z3ext._library.install_lazy_namespace()
        assert torch.ops.z3ext.flat_overflow is op
        """,
        reference,
    )


def test_namespace_used_before_the_import(reference: bool) -> None:
    """Torch has made its own namespace by then; the op is found through old and new one."""
    run(
        """
        import torch

        early = torch.ops.z3ext
        assert not hasattr(early, "flat_overflow")

        import z3ext

        op = torch.ops.z3ext.flat_overflow
        assert early.flat_overflow is op
        assert op(torch.ones(3)).item() is False
        """,
        reference,
    )


THREADS = """
    import threading, time, torch, z3ext
    from z3ext import _library

    calls = []
    {slow}
    ready = threading.Barrier({count})
    found = []
    def use(turn):
        ready.wait()
        time.sleep(turn * {pause})
        try:
            found.append(bool(torch.ops.z3ext.flat_overflow(torch.tensor([torch.inf]))))
        except BaseException as error:
            found.append(error)
    threads = [threading.Thread(target=use, args=(i,)) for i in range({count})]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert found == [True] * {count}, found
    """


def test_threads_at_once(reference: bool) -> None:
    run(THREADS.format(slow="", count=4, pause=0.0), reference)


def test_a_thread_waits_while_another_one_loads() -> None:
    """Compiling takes a minute: an op that is asked for meanwhile is there afterwards."""
    slow = """
    real = _library._register_reference
    def slowly():
        calls.append(1)
        time.sleep(0.5)
        real()
    _library._register_reference = slowly
    """
    run(THREADS.format(slow=slow, count=3, pause=0.1) + "assert len(calls) == 1, calls\n")


# --- the reference -------------------------------------------------------------------------------


def test_schemas_of_the_source() -> None:
    found = _library.schemas(_build.source_dir() / "ops.cpp")
    assert {schema.partition("(")[0] for schema in found} == OPS
    assert len(found) == len(OPS)
    assert all(schema.count("(") == schema.count(")") for schema in found)
    assert "segment_check(Tensor buf, Tensor offsets, int lanes) -> (Tensor, Tensor)" in found


REGISTERED = """
    import torch, z3ext

    z3ext._library.load()
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("z3ext::"):
            print(schema)
    """


def test_reference_registers_the_same_schemas() -> None:
    """Word for word those of the native library, aliases included."""
    found = run(REGISTERED).splitlines()
    assert {line.partition("(")[0].removeprefix("z3ext::") for line in found} == OPS
    if os.environ.get("Z3EXT_REFERENCE") != "1":
        assert sorted(run(REGISTERED, reference=False).splitlines()) == sorted(found)


# --- failures ------------------------------------------------------------------------------------


def test_failed_build_can_be_repeated(reference: bool) -> None:
    run(
        """
        import torch, z3ext
        from z3ext import _library

        def fail():
            raise z3ext.BuildError("z3ext: no compiler; install one")

        saved = _library._load_native, _library._register_reference
        stand_in = torch.ops.z3ext
        _library._load_native = _library._register_reference = fail
        for _ in range(2):
            for call in (lambda: torch.ops.z3ext.flat_overflow, z3ext._library.load):
                try:
                    call()
                except z3ext.BuildError as error:
                    assert "no compiler" in str(error)
                else:
                    raise AssertionError("no BuildError")
                assert type(torch.ops.z3ext).__name__ == "_LazyNamespace"
        _library._load_native, _library._register_reference = saved
        assert stand_in.flat_overflow(torch.ones(2)).item() is False
        assert torch.ops.z3ext.flat_overflow(torch.ones(2)).item() is False
        """,
        reference,
    )


def test_interrupted_load_can_be_repeated(reference: bool) -> None:
    """Between the ops and their fakes, and in the middle of the fakes."""
    run(
        """
        import torch, z3ext
        from z3ext import _library

        real = _library._register_fakes
        def first_only():
            torch.library.register_fake("z3ext::flat_overflow", _library.FAKES["flat_overflow"])
            _library._faked.add("flat_overflow")
            raise KeyboardInterrupt
        def none():
            raise KeyboardInterrupt

        for interrupted in (none, first_only):
            _library._register_fakes = interrupted
            try:
                torch.ops.z3ext.flat_overflow
            except KeyboardInterrupt:
                pass
            else:
                raise AssertionError("not interrupted")
        _library._register_fakes = real
        assert torch.ops.z3ext.flat_overflow(torch.ones(2)).item() is False
        torch.library.opcheck(torch.ops.z3ext.flat_overflow.default, (torch.ones(2),))
        """,
        reference,
    )


def test_file_that_does_not_load(tmp_path: Path) -> None:
    """A damaged library and one that is gone: the error names it, the cause and the remedy."""
    (tmp_path / "library.so").write_bytes(b"no library")
    run(
        f"""
        import pathlib, torch, z3ext
        from z3ext import _library

        for name in ("library.so", "gone.so"):
            path = pathlib.Path({str(tmp_path)!r}) / name
            _library._build.library_path = lambda: path
            try:
                torch.ops.z3ext.flat_overflow
            except z3ext.BuildError as error:
                text = str(error)
            wanted = (f"z3ext: {{path}} does not load: ", "; remove the file", "Z3EXT_REFERENCE")
            for piece in wanted:
                assert piece in text, text
        """,
        reference=False,
    )


# --- torch.compile -------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_compile(when: str, reference: bool) -> None:
    """A compiled function may be the first use of an op, or a later one."""
    run(
        f"""
        import torch, z3ext

        if {when == "after"}:
            z3ext._library.load()

        @torch.compile(fullgraph=True, backend="eager")
        def overflows(buf):
            return torch.ops.z3ext.flat_overflow(buf * 2.0).logical_not()

        assert overflows(torch.ones(5)).item() is True
        assert overflows(torch.tensor([torch.nan] * 5)).item() is False
        """,
        reference,
    )
