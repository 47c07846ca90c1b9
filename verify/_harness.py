"""Runs one test of a Python test suite, inside the grading sandbox: `python3 -c HARNESS`.

Standard input holds one JSON line: `nonce`, `candidate` (file in the workspace), `code` (the test). The candidate is
imported as a module under its file's name, so the test says `from solution import f`. What either prints goes to
standard error; standard output carries only the report `NONCE pass` or `NONCE fail`. So a candidate that ends the
process, prints, or exits with code 0 has reported nothing, and a test that did not report has not been seen.

A candidate in the same process as the test can still search the interpreter for the nonce; see `verify.test_suite`.
"""

HARNESS = """\
import sys
def main():
    import json, os, traceback
    order = json.loads(sys.stdin.buffer.readline())
    nonce, candidate, code = order.pop("nonce"), order.pop("candidate"), order.pop("code")
    report = os.dup(1)
    os.dup2(2, 1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    sys.argv[:] = [candidate]
    sys.path.insert(0, os.path.join(os.getcwd(), os.path.dirname(candidate)))
    write, leave, fail = os.write, os._exit, traceback.print_exc
    try:
        exec(compile(code, "<test>", "exec"), {"__name__": "__test__"})
    except BaseException:
        try:
            fail(limit=-8)
            sys.stderr.flush()
        finally:
            write(report, (nonce + " fail").encode())
            leave(1)
    write(report, (nonce + " pass").encode())
    leave(0)
main()
"""
