/* Stands in for NVIDIA's management library: the calls that the service makes, answered from a file.

   The file is named `machine` and lies beside this library; it is read again in every call, so a test changes
   the machine under a process that has loaded the library. One record a line, fields between tabs:

       init      CODE
       gpu       UUID NAME TOTAL USED RESERVED BUSY MIG    MiB, percent; BUSY and MIG may be - (cannot tell)
       instance  UUID NAME TOTAL USED RESERVED BUSY PARENT SLOT
       process   UUID compute|graphics PID USED            USED may be - (cannot tell)
       health    UUID MILLIWATTS CELSIUS SM MEMORY ECC     MHz; without it the device cannot tell
       remap     UUID 0|1                                  rows that wait for a reset to be remapped
       recovery  UUID ACTION                               what the driver asks for
       xid       UUID NUMBER                               one critical error, the oldest first
       fail      UUID CALL CODE                            CALL may be *
       hang      UUID CALL                                 the call waits until this line is gone; `driver`
                                                           for the UUID: nvmlInit does

   As in the real library, the number of GPUs and their order are those of the first nvmlInit. While a call
   hangs there is a file `hangs-UUID`. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, TIMEOUT = 10, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, VERSION_MISMATCH = 25
};

enum { XID_ERRORS = 8, CLOCK_SM = 1, CLOCK_MEMORY = 2 };
enum { RECOVERY_ACTION = 230 };
enum { MOST = 64, FIELDS = 10, LINE = 1024 };
#define MIB (1024ULL * 1024ULL)
#define NOT_AVAILABLE 0xFFFFFFFFFFFFFFFFULL

typedef struct { char uuid[96]; int is_instance; } Device;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } MemoryV2;
typedef struct { unsigned int gpu, memory; } Utilization;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu_instance, compute_instance; } Process;

typedef struct {
    unsigned int field, scope;
    long long at, latency;
    unsigned int type, code;
    unsigned long long value;
} FieldValue;

typedef struct { const Device *device; int told; } EventSet;
typedef struct { const Device *device; unsigned long long type, data; unsigned int gpu_instance, compute_instance; } Event;

static Device gpus[MOST], instances[MOST][MOST];
static int count, users;

static char *beside(const char *name, char *path) {
    Dl_info self;
    dladdr((void *)beside, &self);
    snprintf(path, LINE, "%.*s%s", (int)(strrchr(self.dli_fname, '/') + 1 - self.dli_fname), self.dli_fname, name);
    return path;
}

/* The next record of this kind; 0 at the end. Its fields are in `field`. */
static int next(FILE *file, const char *kind, char *line, char **field) {
    while (file && fgets(line, LINE, file)) {
        line[strcspn(line, "\n")] = 0;
        int fields = 0;
        for (char *rest = line; fields < FIELDS && (field[fields] = strsep(&rest, "\t")); fields++) {}
        if (fields && !strcmp(field[0], kind)) return fields;
    }
    return 0;
}

static FILE *machine(void) {
    char path[LINE];
    return fopen(beside("machine", path), "r");
}

static int is_call(const char *named, const char *call) { return !strcmp(named, "*") || !strcmp(named, call); }

static int hangs(const char *uuid, const char *call) {
    char line[LINE], *field[FIELDS];
    FILE *file = machine();
    int found = 0;
    while (!found && next(file, "hang", line, field)) found = !strcmp(field[1], uuid) && is_call(field[2], call);
    if (file) fclose(file);
    return found;
}

/* What the call has to answer for this device, with its record in `field`. */
static int look(const Device *device, const char *call, char *line, char **field) {
    if (!users) return UNINITIALIZED;
    if (hangs(device->uuid, call)) {
        char name[128], path[LINE];
        snprintf(name, sizeof name, "hangs-%s", device->uuid);
        FILE *sign = fopen(beside(name, path), "w");
        if (sign) fclose(sign);
        while (hangs(device->uuid, call)) usleep(2000);
        unlink(path);
    }
    FILE *file = machine();
    int code = SUCCESS, found = 0;
    while (next(file, "fail", line, field))
        if (!strcmp(field[1], device->uuid) && is_call(field[2], call)) code = atoi(field[3]);
    if (file) rewind(file);
    while (!found && next(file, device->is_instance ? "instance" : "gpu", line, field))
        found = !strcmp(field[1], device->uuid);
    if (file) fclose(file);
    return code ? code : found ? SUCCESS : GPU_IS_LOST;
}

#define LOOK(device) \
    char line[LINE], *field[FIELDS]; \
    int code = look(device, __func__, line, field); \
    if (code) return code

int nvmlInitWithFlags(unsigned int flags) {
    char line[LINE], *field[FIELDS];
    FILE *file = machine();
    (void)flags;
    while (hangs("driver", __func__)) usleep(2000);
    int code = file ? SUCCESS : DRIVER_NOT_LOADED;
    while (next(file, "init", line, field)) code = atoi(field[1]);
    if (!code && !users++) {
        rewind(file);
        for (count = 0; count < MOST && next(file, "gpu", line, field); count++) {
            snprintf(gpus[count].uuid, sizeof gpus[count].uuid, "%s", field[1]);
        }
    }
    if (file) fclose(file);
    return code;
}

int nvmlShutdown(void) {
    if (!users) return UNINITIALIZED;
    users--;
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    (void)code;
    return "an error of the stand-in";
}

int nvmlDeviceGetCount_v2(unsigned int *found) {
    if (!users) return UNINITIALIZED;
    *found = (unsigned int)count;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Device **device) {
    if (!users) return UNINITIALIZED;
    if (index >= (unsigned int)count) return INVALID_ARGUMENT;
    LOOK(&gpus[index]);
    *device = &gpus[index];
    return SUCCESS;
}

int nvmlDeviceGetUUID(Device *device, char *text, unsigned int size) {
    LOOK(device);
    snprintf(text, size, "%s", field[1]);
    return SUCCESS;
}

int nvmlDeviceGetName(Device *device, char *text, unsigned int size) {
    LOOK(device);
    snprintf(text, size, "%s", field[2]);
    return SUCCESS;
}

/* `used` is without what the driver keeps in the newer form, and with it in the older. */
int nvmlDeviceGetMemoryInfo_v2(Device *device, MemoryV2 *memory) {
    LOOK(device);
    if (memory->version != (sizeof *memory | 2u << 24)) return VERSION_MISMATCH;
    memory->total = MIB * strtoull(field[3], 0, 10);
    memory->used = MIB * strtoull(field[4], 0, 10);
    memory->reserved = MIB * strtoull(field[5], 0, 10);
    memory->free = memory->total - memory->used - memory->reserved;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
    LOOK(device);
    memory->total = MIB * strtoull(field[3], 0, 10);
    memory->used = MIB * (strtoull(field[4], 0, 10) + strtoull(field[5], 0, 10));
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Device *device, Utilization *rates) {
    LOOK(device);
    if (*field[6] == '-') return NOT_SUPPORTED;
    rates->gpu = (unsigned int)atoi(field[6]);
    rates->memory = 0;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(Device *device, unsigned int *current, unsigned int *pending) {
    LOOK(device);
    if (device->is_instance || *field[7] == '-') return NOT_SUPPORTED;
    *current = *pending = (unsigned int)atoi(field[7]);
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned int *most) {
    LOOK(device);
    *most = 7;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned int slot, Device **instance) {
    LOOK(device);
    char parent[sizeof device->uuid];
    snprintf(parent, sizeof parent, "%s", device->uuid);
    FILE *file = machine();
    int found = 0;
    while (!found && next(file, "instance", line, field))
        found = !strcmp(field[7], parent) && strtoul(field[8], 0, 10) == slot;
    if (file) fclose(file);
    if (!found) return NOT_FOUND;
    *instance = &instances[device - gpus][slot];
    (*instance)->is_instance = 1;
    snprintf((*instance)->uuid, sizeof (*instance)->uuid, "%s", field[1]);
    return SUCCESS;
}

static int list(const Device *device, const char *call, const char *kind, unsigned int *room, Process *processes) {
    char line[LINE], *field[FIELDS];
    int code = look(device, call, line, field);
    if (code) return code;
    FILE *file = machine();
    unsigned int found = 0;
    while (next(file, "process", line, field)) {
        if (strcmp(field[1], device->uuid) || strcmp(field[2], kind)) continue;
        if (processes && found < *room) {
            unsigned long long used = *field[4] == '-' ? NOT_AVAILABLE : MIB * strtoull(field[4], 0, 10);
            processes[found] = (Process){(unsigned int)atoi(field[3]), used, ~0u, ~0u};
        }
        found++;
    }
    if (file) fclose(file);
    code = found > (processes ? *room : 0) ? INSUFFICIENT_SIZE : SUCCESS;
    *room = found;
    return code;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned int *room, Process *processes) {
    return list(device, __func__, "compute", room, processes);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(Device *device, unsigned int *room, Process *processes) {
    return list(device, __func__, "graphics", room, processes);
}

int nvmlDeviceGetComputeRunningProcesses_v2(Device *device, unsigned int *room, Process *processes) {
    return list(device, __func__, "compute", room, processes);
}

int nvmlDeviceGetGraphicsRunningProcesses_v2(Device *device, unsigned int *room, Process *processes) {
    return list(device, __func__, "graphics", room, processes);
}

/* Field `at` of the health of a device that is no instance. */
static int health(const Device *device, const char *call, int at, unsigned long long *value) {
    char line[LINE], *field[FIELDS];
    int code = look(device, call, line, field), found = 0;
    if (code) return code;
    FILE *file = machine();
    while (!found && next(file, "health", line, field)) found = !strcmp(field[1], device->uuid);
    if (file) fclose(file);
    if (found) *value = strtoull(field[at], 0, 10);
    return found ? SUCCESS : NOT_SUPPORTED;
}

static int small(const Device *device, const char *call, int at, unsigned int *value) {
    unsigned long long found = 0;
    int code = health(device, call, at, &found);
    *value = (unsigned int)found;
    return code;
}

int nvmlDeviceGetPowerUsage(Device *device, unsigned int *milliwatts) { return small(device, __func__, 2, milliwatts); }

int nvmlDeviceGetTemperature(Device *device, int sensor, unsigned int *celsius) {
    return sensor ? INVALID_ARGUMENT : small(device, __func__, 3, celsius);
}

int nvmlDeviceGetClockInfo(Device *device, int type, unsigned int *mhz) {
    if (type != CLOCK_SM && type != CLOCK_MEMORY) return INVALID_ARGUMENT;
    return small(device, __func__, type == CLOCK_SM ? 4 : 5, mhz);
}

/* Uncorrected (1), since the driver was loaded (0). */
int nvmlDeviceGetTotalEccErrors(Device *device, int type, int counter, unsigned long long *errors) {
    return type != 1 || counter ? INVALID_ARGUMENT : health(device, __func__, 6, errors);
}

/* The number behind a UUID in the record of this kind. */
static int number(const Device *device, const char *call, const char *kind, unsigned int *value) {
    char line[LINE], *field[FIELDS];
    int code = look(device, call, line, field), found = 0;
    if (code) return code;
    FILE *file = machine();
    while (!found && next(file, kind, line, field)) found = !strcmp(field[1], device->uuid);
    if (file) fclose(file);
    if (found) *value = (unsigned int)atoi(field[2]);
    return found ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetRemappedRows(Device *device, unsigned int *correctable, unsigned int *uncorrectable, unsigned int *pending, unsigned int *failed) {
    *correctable = *uncorrectable = *failed = 0;
    return number(device, __func__, "remap", pending);
}

int nvmlDeviceGetRetiredPagesPendingStatus(Device *device, unsigned int *pending) {
    LOOK(device);
    (void)pending;
    return NOT_SUPPORTED;
}

/* One field at a time: the recovery action. */
int nvmlDeviceGetFieldValues(Device *device, int many, FieldValue *values) {
    LOOK(device);
    for (int at = 0; at < many; at++) {
        unsigned int action = 0;
        values[at].code = values[at].field == RECOVERY_ACTION ? number(device, __func__, "recovery", &action) : NOT_SUPPORTED;
        values[at].value = action;
    }
    return SUCCESS;
}

int nvmlEventSetCreate(EventSet **set) {
    *set = calloc(1, sizeof **set);
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(Device *device, unsigned long long types, EventSet *set) {
    unsigned long long value;
    int code = health(device, __func__, 2, &value);
    if (code) return code;
    if (types != XID_ERRORS) return NOT_SUPPORTED;
    set->device = device;
    return SUCCESS;
}

int nvmlEventSetWait_v2(EventSet *set, Event *event, unsigned int milliseconds) {
    (void)milliseconds;
    LOOK(set->device);
    FILE *file = machine();
    int found = 0;
    while (found <= set->told && next(file, "xid", line, field)) found += !strcmp(field[1], set->device->uuid);
    if (file) fclose(file);
    if (found <= set->told) return TIMEOUT;
    set->told++;
    *event = (Event){set->device, XID_ERRORS, strtoull(field[2], 0, 10), ~0u, ~0u};
    return SUCCESS;
}
