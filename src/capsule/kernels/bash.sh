# Capsule's shell kernel: runs pieces of code, one after the other, in one shell.
#
# Started as `bash -c SOURCE`. It speaks what spec/kernel.md says, except that its requests are not
# JSON: first the nonce in a line, then `RUN CODE` in a line each, with a backslash written as \\
# and a newline as \n. Code is sourced, so that variables, functions, options and the directory
# live on, and `return` ends a run. The braces keep our own lines out of a `set -x`.

exec {__capsule_in}<&0 {__capsule_out}>&1 {__capsule_err}>&2 </dev/null

__capsule_send() { # MESSAGE FD
  builtin printf '\0%sS%04x%s' "$__capsule_nonce" "${#1}" "$1" >&"$2"
}

# An interrupt (SIGINT; SIGTERM where code ignores that) leaves every function and file on the way, down to ours: from here on each command
# inside of one becomes a `return`, as bash does for a DEBUG trap that ends with 2.
__capsule_trap='
  if [[ $__capsule_run ]]; then
    __capsule_status=interrupted
    builtin shopt -s extdebug
    builtin trap "((\${#BASH_SOURCE[@]} == 0)) || __capsule_leave" DEBUG
    return 130
  fi'
__capsule_leave() { builtin return 2; }

__capsule_run= __capsule_status= __capsule_undo=
builtin trap "$__capsule_trap" INT TERM
IFS= builtin read -r __capsule_nonce <&"$__capsule_in"
__capsule_send "{\"k\":\"ready\",\"version\":\"${BASH_VERSION%%[!0-9.]*}\",\"failed\":{}}" "$__capsule_out"

while { builtin :; } 2>/dev/null; do
  {
    builtin trap "$__capsule_trap" INT TERM
    IFS= builtin read -r __capsule_line <&"$__capsule_in" || builtin exit 0
    __capsule_next=${__capsule_line%% *}
    [[ $__capsule_next =~ ^[0-9]+$ ]] || continue # half a line, from a server that died
    if [[ $__capsule_line != *' '* ]]; then
      __capsule_message="{\"k\":\"sync\",\"run\":$__capsule_next}"
      __capsule_send "$__capsule_message" "$__capsule_err"
      __capsule_send "$__capsule_message" "$__capsule_out"
      continue
    fi
    builtin printf -v __capsule_code '%b' "${__capsule_line#* }"
    __capsule_status=ok
    builtin set -T # or functions would forget the DEBUG trap that ends them
    __capsule_run=$__capsule_next
  } 2>/dev/null
  builtin source /dev/fd/63 63<<<"$__capsule_code"
  {
    __capsule_exit=$? __capsule_run=
    builtin eval "$__capsule_undo"
    __capsule_undo=
    if [[ $__capsule_status == interrupted ]]; then
      builtin trap - DEBUG
      builtin shopt -u extdebug
      __capsule_exit=130
    elif [[ $__capsule_exit != 0 ]]; then
      __capsule_status=error
    fi
    builtin set +T
    __capsule_send "{\"k\":\"end\",\"run\":$__capsule_next}" "$__capsule_err"
    __capsule_send "{\"k\":\"end\",\"run\":$__capsule_next,\"status\":\"$__capsule_status\",\"code\":$__capsule_exit}" "$__capsule_out"
  } 2>/dev/null
done
