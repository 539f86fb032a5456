// What the program asks of the system, the same functions of each:
//
//     kSeparators             what may stand between folders in a path
//     kToRead, kToCreate      flags of `open`: bytes as they are, and no program that is started has the file
//     kind_of                 what is no file
//     physical_memory         bytes
//     resolved                where links lead; empty where nothing is there
//     new_draft               a file of a new name, to be written; the name's last letters are chosen
//     put_in_place            a draft under its own name, whole, and closes it; where that fails there is neither
//     affinity                the CPUs that this process may run on, in order; none where nobody says
//     set_default             a variable of the environment, where it is not set
//     let_writes_fail         a limit on sizes of files is an error of the write then, not the end of the program
#pragma once

#if defined(_WIN32)
#include "system_windows.h"
#else
#include "system_posix.h"
#endif
