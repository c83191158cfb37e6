# To be sourced, with $root set: finds the interpreter, and has it find the sources.
if [ -z "${PYTHON:-}" ]; then
    if [ -n "${VIRTUAL_ENV:-}" ]; then
        PYTHON=$VIRTUAL_ENV/bin/python
    elif [ -x "$root/.venv/bin/python" ]; then
        PYTHON=$root/.venv/bin/python
    else
        PYTHON=python3
    fi
fi
if ! "$PYTHON" -c 'from importlib.util import find_spec
exit(find_spec("jax") is None)' >/dev/null 2>&1; then
    echo "$PYTHON has no JAX. Run 'make install' in $root first, or name another" >&2
    echo "interpreter: PYTHON=/path/to/python sh $0 ..." >&2
    exit 2
fi
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
export PYTHON PYTHONPATH
