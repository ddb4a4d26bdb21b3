#!/bin/sh
# In a crontab, with the Python that has dask_redist, since cron's PATH is short:
#   PYTHON=/opt/venv/bin/python
#   15 3 * * *  /opt/climatology/climatology.cron.sh /data/maps.zarr /data/climatology.zarr
#
# Nothing is printed unless something went wrong, so that cron's mail means something.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# A night that takes longer than a day is not begun twice: exit code 75, try again later.
code=0
flock --nonblock --conflict-exit-code 75 "$2.lock" \
    "${PYTHON:-python3}" "$here/job.py" "$1" "$2" --local "${RANKS:-4}" >"$log" 2>&1 || code=$?

if [ "$code" -ne 0 ]; then
    cat "$log" >&2
    echo "climatology of $1 failed, exit code $code" >&2
fi
exit "$code"
