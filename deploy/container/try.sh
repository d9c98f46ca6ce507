#!/bin/sh
# The image's steps without a container engine: the wheel in an environment of its own, then a
# site made, checked and read as user 10001 on a root file system mounted read-only.
#   sudo sh deploy/container/try.sh [PYTHON]
# With PYTHON (of an environment that has the dependencies) nothing is downloaded: they are taken
# from there, and only the wheel is installed. It needs root, for the mounts and for the other user.
set -eu
here=$(cd "$(dirname "$0")/../.." && pwd)
borrowed=${1:-}
work=$(mktemp -d /var/tmp/xcal-image.XXXXXX)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"

echo "== the wheel"
builder=${borrowed:-python3}
mkdir "$work/source"
cp -r "$here/src" "$here/pyproject.toml" "$here/README.md" "$here/LICENSE" "$work/source"
"$builder" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$work" "$work/source"
wheel=$(ls "$work"/xcal_fl-*.whl)

echo "== an environment of its own"
"$builder" -m venv --without-pip "$work/xcal"
into="$work/xcal/bin/python"
if [ -n "$borrowed" ]; then
    "$builder" -m pip --python "$into" install --quiet --no-deps --no-index "$wheel"
    site=$("$work/xcal/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "$work/borrowed" > "$site/borrowed.pth"
    lent=$("$borrowed" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
else
    "$builder" -m pip --python "$into" install --quiet -c "$here/constraints.txt" \
        "${wheel}[nvflare,dicom]"
    for tool in pytest mypy ruff hypothesis opacus; do
        if "$work/xcal/bin/python" -c "import $tool" 2>/dev/null; then
            echo "the image would have $tool"; exit 1
        fi
    done
fi

echo "== as user 10001, the root file system read-only"
mkdir "$work/party" "$work/images" "$work/base" "$work/borrowed"
chown 10001:10001 "$work/party"
# Interpreter and borrowed packages may lie where user 10001 cannot look, as below /root or in the
# /tmp that is covered: they are shown elsewhere.
base=$("$builder" -c 'import sys; print(sys.base_prefix)')
name=$("$builder" -c 'import sys; print(f"python{sys.version_info[0]}.{sys.version_info[1]}")')
ln -sf "$work/base/bin/$name" "$work/xcal/bin/python"
sed -i "s|^home = .*|home = $work/base/bin|" "$work/xcal/pyvenv.cfg"
cat > "$work/inside.sh" <<INSIDE
set -eu
mount --make-rprivate /
mount --bind "$work/party" "$work/party"
mount --bind "$base" "$work/base"
mount -o remount,bind,ro "$work/base"
if [ -n "${lent:-}" ]; then
    mount --bind "${lent:-}" "$work/borrowed"
    mount -o remount,bind,ro "$work/borrowed"
fi
mount -o remount,bind,ro /
mount -t tmpfs -o mode=1777 tmpfs /tmp
exec setpriv --reuid=10001 --regid=10001 --clear-groups --no-new-privs --bounding-set=-all \\
    env -i PATH="$work/xcal/bin:/usr/bin:/bin" HOME="$work/party" XCAL_HOME="$work/images" \\
    PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 sh "$work/steps.sh"
INSIDE
cat > "$work/steps.sh" <<STEPS
set -eu
[ "\$(id -u)" = 10001 ]
if touch "$work/images/x" 2>/dev/null || touch /var/tmp/x 2>/dev/null; then
    echo "the root file system can be written"; exit 1
fi
cd "$work/party"
python -c 'import xcal, sys; print(xcal.__file__); sys.exit(not xcal.__file__.startswith("$work"))'
xcal --version
xcal site init "$work/party/site" --client hospital-a --data smear --population people \\
    --epsilon 5 --delta 1e-4 --unit record
xcal site check "$work/party/site"
xcal ledger verify "$work/party/site"
# What the image does by default, and its health check: in one sentence where there is no party yet.
for words in "start $work/party --foreground" "metrics $work/party --health"; do
    said=\$(xcal federation \$words 2>&1) && { echo "an empty folder was taken for a party"; exit 1; }
    case "\$said" in *Traceback*) echo "\$said"; exit 1 ;; esac
    echo "\$said"
done
STEPS
unshare --mount sh "$work/inside.sh"
echo "== the image's steps work"
echo "tested: the wheel, its commands as user 10001 without capabilities, root file system read-only"
if [ -n "$borrowed" ]; then
    echo "not tested: the download of what it needs (borrowed), so not that test tools are absent"
fi
echo "not tested: the Dockerfile itself, its base image, a container engine, a federation's traffic"
