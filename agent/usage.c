/* What the box uses: from its cgroups where it has them, else summed over its processes by pid 1. */
#include "agent.h"
#include <stdio.h>
#include <sys/statfs.h>

static bool read_file(const char *dir, const char *name, char *text, size_t room) {
    char path[4200];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    cleanup_fd int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : RETRY(read(fd, text, room - 1));
    if (n < 0) return false;
    text[n] = 0;
    return true;
}

/* The first of our cgroups that has this file; a value behind `key`, or the whole content. */
static bool cgroup_value(const char *name, const char *key, double *value) {
    char text[8192];
    for (int i = 0; i < box.nusage; i++) {
        if (!read_file(box.usage_dirs[i], name, text, sizeof text)) continue;
        char *p = text;
        if (key) {
            size_t n = strlen(key);
            for (p = text; p && (strncmp(p, key, n) || p[n] != ' '); p = strchr(p, '\n') ? strchr(p, '\n') + 1 : NULL) {}
            if (!p) return false;
            p += n;
        }
        *value = strtod(p, NULL);
        return true;
    }
    return false;
}

static uint64_t told;

void oom_told(void) { told++; }

/* Asked with every exec. gVisor's cgroups do not count it: there one look is enough. */
uint64_t oom_kills(void) {
    static bool uncounted;
    double v = 0;
    if (uncounted || !box.cgroup_version) return told;
    bool v2 = box.cgroup_version == 2, counted = cgroup_value(v2 ? "memory.events" : "memory.oom_control", "oom_kill", &v);
    uncounted = !counted && errno == ENOENT;
    return (uint64_t)v + told;
}

/* Of the device of the box's own disk: v1 does not say who wrote what the kernel writes later. It has counted for other boxes
 * before, so from the beginning of this one. */
static double sectors_before[2];

static bool device_sectors(double *rd, double *wr) {
    char text[512];
    ssize_t n = box.disk_stat < 0 ? -1 : RETRY(pread(box.disk_stat, text, sizeof text - 1, 0));
    text[n > 0 ? n : 0] = 0;
    return n > 0 && sscanf(text, "%*u %*u %lf %*u %*u %*u %lf", rd, wr) == 2;
}

void usage_begin(void) { device_sectors(&sectors_before[0], &sectors_before[1]); }

static bool device_bytes(double *rd, double *wr) {
    if (!device_sectors(rd, wr)) return false;
    *rd = (*rd - sectors_before[0]) * 512;
    *wr = (*wr - sectors_before[1]) * 512;
    return true;
}

/* Sums "rbytes=" and "wbytes=" (v2) or "Read"/"Write" lines (v1). */
static bool io_bytes(double *rd, double *wr) {
    char text[16384];
    bool any = false;
    const char *name = box.cgroup_version == 2 ? "io.stat" : "blkio.throttle.io_service_bytes";
    *rd = *wr = 0;
    for (int i = 0; i < box.nusage; i++) {
        if (!read_file(box.usage_dirs[i], name, text, sizeof text)) continue;
        any = true;
        for (char *p = text; (p = strpbrk(p, "rwRW")); p++) {
            if (!strncmp(p, "rbytes=", 7)) *rd += strtod(p + 7, NULL);
            else if (!strncmp(p, "wbytes=", 7)) *wr += strtod(p + 7, NULL);
            else if (!strncmp(p, "Read ", 5)) *rd += strtod(p + 5, NULL);
            else if (!strncmp(p, "Write ", 6)) *wr += strtod(p + 6, NULL);
        }
    }
    return any || device_bytes(rd, wr);
}

static void field(struct buf *b, const char *name, bool known, double v) {
    if (known) buf_printf(b, "\"%s\":%.*f,", name, v == (double)(int64_t)v ? 0 : 3, v);
    else buf_printf(b, "\"%s\":null,", name);
}

void usage_json(struct buf *b, int disk_fd, int processes, double proc_cpu_ms, uint64_t proc_rss) {
    double cpu = proc_cpu_ms, memory = (double)proc_rss, peak = 0, count = processes, rd, wr;
    struct statfs fs;
    bool v2 = box.cgroup_version == 2, known, known_peak, io = io_bytes(&rd, &wr);
    if (v2 ? cgroup_value("cpu.stat", "usage_usec", &cpu) : cgroup_value("cpuacct.usage", NULL, &cpu)) cpu /= v2 ? 1e3 : 1e6;
    known = cgroup_value(v2 ? "memory.current" : "memory.usage_in_bytes", NULL, &memory) || proc_rss; /* nothing runs: files may take some */
    known_peak = cgroup_value(v2 ? "memory.peak" : "memory.max_usage_in_bytes", NULL, &peak);
    /* in a container our own are members, too: what was counted by name is nearer */
    if (!box.container && cgroup_value("pids.current", NULL, &count) && count >= 1 && forker_wanted()) count--;
    bool disk = disk_fd >= 0 && !fstatfs(disk_fd, &fs);
    buf_add(b, "{", 1);
    field(b, "cpu_ms", true, cpu);
    field(b, "memory_bytes", known, memory);
    field(b, "memory_peak_bytes", known_peak, peak);
    field(b, "processes", true, count);
    field(b, "io_read_bytes", io, io ? rd : 0);
    field(b, "io_write_bytes", io, io ? wr : 0);
    field(b, "disk_bytes", disk, disk ? (double)(fs.f_blocks - fs.f_bfree) * (double)fs.f_bsize : 0);
    field(b, "inodes", disk, disk ? (double)(fs.f_files - fs.f_ffree) : 0);
    field(b, "oom_kills", box.cgroup_version > 0 || json_get(box.spec, "memory_watch"), (double)oom_kills());
    buf_printf(b, "\"source\":\"%s\"}", v2 ? "cgroup2" : box.cgroup_version == 1 ? "cgroup1" : "proc");
}
