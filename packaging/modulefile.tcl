#%Module1.0
## hpcsched @VERSION@, in @PREFIX@: for Environment Modules, and for Lmod, which reads these too.

proc ModulesHelp {} {
    puts stderr "hpcsched @VERSION@ runs your queue of trainings inside one batch allocation."
    puts stderr "Begin with: hpcsched --help; man hpcsched; hpcsched doctor"
}
module-whatis "hpcsched @VERSION@: a companion scheduler for deep learning inside one Slurm or LSF allocation"

conflict hpcsched

# The command alone, not the Python that runs it: the user's own Python stays the first in PATH.
prepend-path PATH "@PREFIX@/bin"

# man finds the pages beside the command, unless somebody says where it is to look.
if {[info exists env(MANPATH)]} {
    prepend-path MANPATH "@PREFIX@/share/man"
}

# Completion in bash and fish; without the variable these look into the two folders of the system.
if {![info exists env(XDG_DATA_DIRS)]} {
    append-path XDG_DATA_DIRS /usr/local/share
    append-path XDG_DATA_DIRS /usr/share
}
prepend-path XDG_DATA_DIRS "@PREFIX@/share"

# Other values of the site's settings for those who load the module; what the site's own files (that of the
# installation, /etc/hpcsched/config.toml) have locked or limited holds all the same:
# setenv HPCSCHED_SITE_CONFIG /path/to/config.toml
