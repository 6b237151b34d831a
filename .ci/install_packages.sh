#!/usr/bin/env bash
# Installs Debian packages that are missing, where that is possible: `install_packages.sh NAME ...`. It never fails, because
# what needs a package that could not be installed says so itself.
missing=()
for name in "$@"; do
    dpkg -s "$name" >/dev/null 2>&1 || missing+=("$name")
done
if [ "${#missing[@]}" -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    (apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}") >/dev/null 2>&1 ||
        echo "could not be installed: ${missing[*]}"
fi
exit 0
