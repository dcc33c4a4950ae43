# bash completion for tt-device-plugin(8)

_tt_device_plugin() {
    local cur prev words cword split
    _init_completion -s || return

    local boolean='--fail-on-init-error'
    case $prev in
    --config-file | --metrics-file | --pod-resources-socket)
        _filedir
        return
        ;;
    --device-plugin-dir | --sysfs-root | --dev-root | --proc-root | --cdi-dir | --labels-dir)
        _filedir -d
        return
        ;;
    --resource-naming) COMPREPLY=($(compgen -W 'board card arch' -- "$cur")) ;;
    --device-id-strategy) COMPREPLY=($(compgen -W 'bdf asic index' -- "$cur")) ;;
    --visible-devices) COMPREPLY=($(compgen -W 'bdf index none' -- "$cur")) ;;
    --unit) COMPREPLY=($(compgen -W 'chip board' -- "$cur")) ;;
    --device-list-strategy) COMPREPLY=($(compgen -W 'device-specs cdi' -- "$cur")) ;;
    --log-level) COMPREPLY=($(compgen -W 'debug info warning error' -- "$cur")) ;;
    --resource-domain) return ;;
    "$boolean")
        # Its value comes after "=" only.
        if $split; then
            COMPREPLY=($(compgen -W 'true false' -- "$cur"))
            return
        fi
        ;;&
    *)
        if [[ $cur == -* ]]; then
            COMPREPLY=($(compgen -W '--help --version --json --config-only --config-file --device-plugin-dir
                --sysfs-root --dev-root --proc-root --resource-domain --resource-naming --device-id-strategy
                --visible-devices --unit --device-list-strategy --cdi-dir --labels-dir --metrics-file
                --pod-resources-socket --fail-on-init-error --log-level' -- "$cur"))
        else
            COMPREPLY=($(compgen -W 'run list check' -- "$cur"))
        fi
        ;;
    esac
} &&
    complete -F _tt_device_plugin tt-device-plugin
