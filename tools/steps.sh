# Sourced by scripts that do several steps in the folder $out.

# say TITLE: announces a step, with the seconds since the script began.
say() { printf '\n== %s (%d s)\n' "$*" $SECONDS; }

# once NAME COMMAND...: runs a step unless it was finished before.
once() {
  [ -e "$out/.done-$1" ] && { echo "   reusing $1"; return; }
  "${@:2}" && touch "$out/.done-$1"
}
