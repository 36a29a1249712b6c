//! The C side: a `sqlite3_vfs` and the `sqlite3_io_methods` of its files.
//!
//! Every function asks the [`Device`] and passes the call on to the default VFS. A file of ours is
//! followed in memory by the real one:
//!
//! ```text
//! szOsFile:  │ methods │ device │ node │ owes_directory │ kind │ told │ real file ... │
//! ```
//!
//! The safety of all of it rests on SQLite's side of the contract:
//!
//! 1. A `*mut sqlite3_vfs` is one we registered, so its `pAppData` is a leaked [`Context`].
//! 2. `xOpen` gets `szOsFile` writable bytes, aligned to 8.
//! 3. A `*mut sqlite3_file` in any other method was opened by our `xOpen` and not yet closed.
//! 4. Other pointers are valid for as many bytes as their lengths say, and names end with a NUL.
//! 5. The default VFS is never unregistered or freed, and its functions may be called by any thread.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rusqlite::ffi::{self, sqlite3_file, sqlite3_int64, sqlite3_io_methods, sqlite3_vfs};

use super::record::{Node, Operation};
use super::{Code, Device};

/// A disk's entry in SQLite's list of VFSs, until dropped.
///
/// What SQLite may point to is leaked, a few hundred bytes a disk: a connection keeps its VFS pointer
/// for life and nothing tells us when the last one is gone.
pub(super) struct Registration {
    name: CString,
    device: &'static Device,
    vfs: *mut sqlite3_vfs,
}

// SAFETY: `vfs` is leaked and, once registered, only handed to SQLite, which locks its list of VFSs.
unsafe impl Send for Registration {}
// SAFETY: as above; `&Registration` gives no access to what `vfs` points to.
unsafe impl Sync for Registration {}

/// What `pAppData` of our VFS points to.
struct Context {
    device: Device,
    real: *mut sqlite3_vfs,
}

impl Registration {
    pub(super) fn new(name: &str, device: Device) -> Self {
        static REGISTERED: AtomicU64 = AtomicU64::new(0);
        let number = REGISTERED.fetch_add(1, Ordering::Relaxed);
        let name = CString::new(format!("{name}-{number}")).expect("a disk's name has no NUL");

        // SAFETY: a null name asks for the default VFS; this also initialises SQLite.
        let real = unsafe { ffi::sqlite3_vfs_find(ptr::null()) };
        // SAFETY: what `sqlite3_vfs_find` returns is null or a registered VFS (contract 5).
        let wrapped = unsafe { real.as_ref() }.expect("SQLite has a default VFS");
        let context: &'static Context = Box::leak(Box::new(Context { device, real }));
        let file_size = c_int::try_from(size_of::<File>()).expect("a file of ours is small");
        let vfs = Box::into_raw(Box::new(sqlite3_vfs {
            iVersion: 2,
            szOsFile: file_size + wrapped.szOsFile,
            mxPathname: wrapped.mxPathname,
            pNext: ptr::null_mut(),
            zName: name.clone().into_raw(),
            pAppData: ptr::from_ref(context).cast_mut().cast(),
            xOpen: Some(open),
            xDelete: Some(delete),
            xAccess: Some(access),
            xFullPathname: Some(full_pathname),
            // Extensions cannot be loaded through a test disk; SQLite asks for the rest only after success.
            xDlOpen: Some(dl_open),
            xDlError: Some(dl_error),
            xDlSym: None,
            xDlClose: None,
            xRandomness: Some(randomness),
            xSleep: Some(sleep),
            xCurrentTime: Some(current_time),
            xGetLastError: Some(get_last_error),
            xCurrentTimeInt64: Some(current_time_int64),
            xSetSystemCall: None,
            xGetSystemCall: None,
            xNextSystemCall: None,
        }));
        // SAFETY: `vfs` is complete and leaked, as is all it points to.
        let code = unsafe { ffi::sqlite3_vfs_register(vfs, 0) };
        assert_eq!(code, ffi::SQLITE_OK, "registering a VFS only fails if SQLite cannot start");
        Self { name, device: &context.device, vfs }
    }

    pub(super) fn name(&self) -> &str {
        self.name.to_str().expect("made from a str")
    }

    pub(super) fn device(&self) -> &'static Device {
        self.device
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: `vfs` was registered in `new`, and stays valid after this because it is leaked.
        unsafe { ffi::sqlite3_vfs_unregister(self.vfs) };
        self.device.retire();
    }
}

/// The part of an open file that is ours; the real file follows it.
#[repr(C)]
struct File {
    base: sqlite3_file,
    device: &'static Device,
    /// `None` for a nameless temporary file, which no power cut leaves behind.
    node: Option<Node>,
    /// Whether the next sync includes the directory, see the promises of the [parent module](super).
    owes_directory: AtomicBool,
    kind: Kind,
    /// How many failed syncs this handle was told of.
    told: AtomicU64,
}

/// What a file is to SQLite.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Database,
    Log,
    Other,
}

impl Kind {
    /// By the flags it is opened with.
    fn of(flags: c_int) -> Self {
        if flags & ffi::SQLITE_OPEN_MAIN_DB != 0 {
            Self::Database
        } else if flags & ffi::SQLITE_OPEN_WAL != 0 {
            Self::Log
        } else {
            Self::Other
        }
    }
}

const _: () = assert!(
    align_of::<File>() == 8 && size_of::<File>().is_multiple_of(8),
    "the real file must be aligned"
);

static METHODS: sqlite3_io_methods = sqlite3_io_methods {
    // Version 3 adds memory mapping, which would write past us.
    iVersion: 2,
    xClose: Some(close),
    xRead: Some(read),
    xWrite: Some(write),
    xTruncate: Some(truncate),
    xSync: Some(sync),
    xFileSize: Some(file_size),
    xLock: Some(lock),
    xUnlock: Some(unlock),
    xCheckReservedLock: Some(check_reserved_lock),
    xFileControl: Some(file_control),
    xSectorSize: Some(sector_size),
    xDeviceCharacteristics: Some(device_characteristics),
    xShmMap: Some(shm_map),
    xShmLock: Some(shm_lock),
    xShmBarrier: Some(shm_barrier),
    xShmUnmap: Some(shm_unmap),
    xFetch: None,
    xUnfetch: None,
};

/// Calls a function of the default VFS; evaluates to `$missing` if it has none by that name.
macro_rules! real_vfs {
    ($context:expr, $function:ident($($argument:expr),*), $missing:expr) => {{
        let real = $context.real;
        // SAFETY: the default VFS outlives us (contract 5).
        match unsafe { (*real).$function } {
            // SAFETY: the arguments come from SQLite, for a function of the same name (contract 4).
            Some(function) => unsafe { function(real $(, $argument)*) },
            None => $missing,
        }
    }};
}

/// Calls a method of the real file behind `$file`; evaluates to `$missing` if it has none by that name.
macro_rules! real_file {
    ($file:expr, $method:ident($($argument:expr),*), $missing:expr) => {{
        let real = real_file($file);
        // SAFETY: our `xOpen` succeeded only after the real one had set the methods (contract 3).
        let methods = unsafe { (*real).pMethods };
        // SAFETY: methods live as long as their file, and `open` has checked that they are version 2.
        match unsafe { (*methods).$method } {
            // SAFETY: the arguments come from SQLite, for a method of the same name (contract 4).
            Some(method) => unsafe { method(real $(, $argument)*) },
            None => $missing,
        }
    }};
}

/// Only call with a VFS that SQLite passed in (contract 1).
unsafe fn context<'a>(vfs: *mut sqlite3_vfs) -> &'a Context {
    // SAFETY: contract 1.
    let context = unsafe { (*vfs).pAppData };
    // SAFETY: contract 1; nothing takes a `&mut Context` once it is leaked.
    unsafe { &*context.cast::<Context>() }
}

/// Only call with a file that SQLite passed in (contract 3).
unsafe fn ours<'a>(file: *mut sqlite3_file) -> &'a File {
    // SAFETY: contract 3; `open` wrote a `File` there and nothing takes a `&mut File`.
    unsafe { &*file.cast::<File>() }
}

/// Where the real file is: right behind ours.
fn real_file(file: *mut sqlite3_file) -> *mut sqlite3_file {
    file.cast::<File>().wrapping_add(1).cast()
}

/// Only call with a name that SQLite passed in, and not null (contract 4).
unsafe fn path<'a>(name: *const c_char) -> &'a Path {
    // SAFETY: contract 4.
    let name = unsafe { CStr::from_ptr(name) };
    Path::new(OsStr::from_bytes(name.to_bytes()))
}

/// SQLite's offsets and lengths are never negative.
fn unsigned<T>(number: T) -> usize
where
    usize: TryFrom<T>,
{
    usize::try_from(number).unwrap_or_default()
}

unsafe extern "C" fn open(
    vfs: *mut sqlite3_vfs,
    name: *const c_char,
    file: *mut sqlite3_file,
    flags: c_int,
    out_flags: *mut c_int,
) -> c_int {
    const JOURNALS: c_int =
        ffi::SQLITE_OPEN_WAL | ffi::SQLITE_OPEN_MAIN_JOURNAL | ffi::SQLITE_OPEN_SUPER_JOURNAL;
    // SAFETY: contract 1.
    let context = unsafe { context(vfs) };
    let device = &context.device;
    let real = real_file(file);
    // SAFETY: contract 2. Without methods, SQLite does not close a file that failed to open.
    unsafe { file.write(sqlite3_file { pMethods: ptr::null() }) };
    // SAFETY: contract 2; the real file's memory begins with a `sqlite3_file`.
    unsafe { real.write(sqlite3_file { pMethods: ptr::null() }) };

    let open_real = || {
        let code = real_vfs!(context, xOpen(name, real, flags, out_flags), ffi::SQLITE_CANTOPEN);
        // SAFETY: initialised above, perhaps replaced by the real `xOpen`.
        let methods = unsafe { (*real).pMethods };
        // SAFETY: methods which are not null live as long as their file.
        let Some(methods) = (unsafe { methods.as_ref() }) else {
            return code;
        };
        if code == ffi::SQLITE_OK && methods.iVersion >= 2 {
            return code;
        }
        if let Some(close) = methods.xClose {
            // SAFETY: a file with methods may be closed, and is not used afterwards.
            unsafe { close(real) };
        }
        if code == ffi::SQLITE_OK { ffi::SQLITE_CANTOPEN } else { code }
    };
    let opened = if name.is_null() || flags & ffi::SQLITE_OPEN_DELETEONCLOSE != 0 {
        let code = if device.crashed() { ffi::SQLITE_CANTOPEN } else { open_real() };
        if code == ffi::SQLITE_OK { Ok(None) } else { Err(code) }
    } else {
        // SAFETY: contract 4, and not null.
        device.open(unsafe { path(name) }, flags, open_real).map(Some)
    };
    match opened {
        Ok(node) => {
            let ours = File {
                base: sqlite3_file { pMethods: &raw const METHODS },
                device,
                node,
                owes_directory: AtomicBool::new(
                    flags & ffi::SQLITE_OPEN_CREATE != 0 && flags & JOURNALS != 0,
                ),
                kind: Kind::of(flags),
                told: AtomicU64::new(node.map_or(0, |node| device.failed_syncs(node))),
            };
            // SAFETY: contract 2.
            unsafe { file.cast::<File>().write(ours) };
            ffi::SQLITE_OK
        }
        Err(code) => code,
    }
}

unsafe extern "C" fn delete(
    vfs: *mut sqlite3_vfs,
    name: *const c_char,
    sync_directory: c_int,
) -> c_int {
    // SAFETY: contract 1.
    let context = unsafe { context(vfs) };
    // SAFETY: contract 4; only `xOpen` may get a null name.
    let path = unsafe { path(name) };
    context.device.delete(path, sync_directory & 1 != 0, || {
        // Without the directory's sync: the record knows, and the real files need none.
        real_vfs!(context, xDelete(name, 0), ffi::SQLITE_IOERR_DELETE)
    })
}

unsafe extern "C" fn access(
    vfs: *mut sqlite3_vfs,
    name: *const c_char,
    flags: c_int,
    out: *mut c_int,
) -> c_int {
    // SAFETY: contract 1.
    let context = unsafe { context(vfs) };
    if context.device.crashed() {
        return ffi::SQLITE_IOERR_ACCESS;
    }
    real_vfs!(context, xAccess(name, flags, out), ffi::SQLITE_IOERR_ACCESS)
}

unsafe extern "C" fn full_pathname(
    vfs: *mut sqlite3_vfs,
    name: *const c_char,
    length: c_int,
    out: *mut c_char,
) -> c_int {
    // SAFETY: contract 1.
    let context = unsafe { context(vfs) };
    real_vfs!(context, xFullPathname(name, length, out), ffi::SQLITE_CANTOPEN)
}

unsafe extern "C" fn dl_open(_vfs: *mut sqlite3_vfs, _name: *const c_char) -> *mut c_void {
    ptr::null_mut()
}

unsafe extern "C" fn dl_error(_vfs: *mut sqlite3_vfs, _length: c_int, _out: *mut c_char) {}

unsafe extern "C" fn randomness(vfs: *mut sqlite3_vfs, length: c_int, out: *mut c_char) -> c_int {
    // SAFETY: contract 1.
    let context = unsafe { context(vfs) };
    real_vfs!(context, xRandomness(length, out), 0)
}

unsafe extern "C" fn sleep(vfs: *mut sqlite3_vfs, microseconds: c_int) -> c_int {
    // SAFETY: contract 1.
    let context = unsafe { context(vfs) };
    real_vfs!(context, xSleep(microseconds), 0)
}

unsafe extern "C" fn current_time(vfs: *mut sqlite3_vfs, out: *mut f64) -> c_int {
    // SAFETY: contract 1.
    let context = unsafe { context(vfs) };
    real_vfs!(context, xCurrentTime(out), ffi::SQLITE_ERROR)
}

unsafe extern "C" fn current_time_int64(vfs: *mut sqlite3_vfs, out: *mut sqlite3_int64) -> c_int {
    // SAFETY: contract 1.
    let context = unsafe { context(vfs) };
    real_vfs!(context, xCurrentTimeInt64(out), ffi::SQLITE_ERROR)
}

unsafe extern "C" fn get_last_error(
    vfs: *mut sqlite3_vfs,
    length: c_int,
    out: *mut c_char,
) -> c_int {
    // SAFETY: contract 1.
    let context = unsafe { context(vfs) };
    real_vfs!(context, xGetLastError(length, out), 0)
}

/// Works after a power cut too: the process still owns its descriptors.
unsafe extern "C" fn close(file: *mut sqlite3_file) -> c_int {
    // SAFETY: contract 3.
    let ours = unsafe { ours(file) };
    if let Some(node) = ours.node {
        ours.device.close(node);
    }
    real_file!(file, xClose(), ffi::SQLITE_OK)
}

unsafe extern "C" fn read(
    file: *mut sqlite3_file,
    out: *mut c_void,
    length: c_int,
    offset: sqlite3_int64,
) -> c_int {
    // SAFETY: contract 3.
    let ours = unsafe { ours(file) };
    if ours.device.crashed() || ours.node.is_some() && ours.device.reads.fails() {
        return ffi::SQLITE_IOERR_READ;
    }
    real_file!(file, xRead(out, length, offset), ffi::SQLITE_IOERR_READ)
}

unsafe extern "C" fn write(
    file: *mut sqlite3_file,
    data: *const c_void,
    length: c_int,
    offset: sqlite3_int64,
) -> c_int {
    // SAFETY: contract 3.
    let ours = unsafe { ours(file) };
    let real = || real_file!(file, xWrite(data, length, offset), ffi::SQLITE_IOERR_WRITE);
    // SAFETY: contract 4.
    let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), unsigned(length)) };
    let offset = unsigned(offset);
    if ours.kind == Kind::Database {
        ours.device.note_writer();
    }
    change(ours, ffi::SQLITE_IOERR_WRITE, |node| Operation::Write { node, offset, bytes }, real)
}

unsafe extern "C" fn truncate(file: *mut sqlite3_file, length: sqlite3_int64) -> c_int {
    // SAFETY: contract 3.
    let ours = unsafe { ours(file) };
    let real = || real_file!(file, xTruncate(length), ffi::SQLITE_IOERR_TRUNCATE);
    let length = unsigned(length);
    change(ours, ffi::SQLITE_IOERR_TRUNCATE, |node| Operation::Truncate { node, length }, real)
}

unsafe extern "C" fn sync(file: *mut sqlite3_file, _flags: c_int) -> c_int {
    // SAFETY: contract 3.
    let ours = unsafe { ours(file) };
    let directory = ours.owes_directory.load(Ordering::Relaxed);
    // The real file is not synced: that would cost most of a run's time and nothing depends on it.
    let told = ours.told.load(Ordering::Relaxed);
    let operation = |node| Operation::Sync { node, directory, told };
    if ours.kind == Kind::Log {
        ours.device.log_syncs.fetch_add(1, Ordering::Relaxed);
    }
    let code = change(ours, ffi::SQLITE_IOERR_FSYNC, operation, || ffi::SQLITE_OK);
    if code == ffi::SQLITE_OK {
        ours.owes_directory.store(false, Ordering::Relaxed);
        return code;
    }
    if ours.kind == Kind::Log {
        ours.device.failed_log_syncs.fetch_add(1, Ordering::Relaxed);
    }
    if let Some(node) = ours.node {
        ours.told.store(ours.device.failed_syncs(node), Ordering::Relaxed);
    }
    code
}

/// Performs an operation on a named file; on a nameless one only a power cut can prevent it.
fn change<'a>(
    file: &File,
    error: Code,
    operation: impl FnOnce(Node) -> Operation<'a>,
    real: impl FnOnce() -> Code,
) -> Code {
    match file.node {
        Some(node) => file.device.perform(operation(node), real),
        None if file.device.crashed() => error,
        None => real(),
    }
}

unsafe extern "C" fn file_size(file: *mut sqlite3_file, out: *mut sqlite3_int64) -> c_int {
    // SAFETY: contract 3.
    if unsafe { ours(file) }.device.crashed() {
        return ffi::SQLITE_IOERR_FSTAT;
    }
    real_file!(file, xFileSize(out), ffi::SQLITE_IOERR_FSTAT)
}

unsafe extern "C" fn lock(file: *mut sqlite3_file, level: c_int) -> c_int {
    // SAFETY: contract 3.
    if unsafe { ours(file) }.device.crashed() {
        return ffi::SQLITE_IOERR_LOCK;
    }
    real_file!(file, xLock(level), ffi::SQLITE_IOERR_LOCK)
}

/// Works after a power cut too, as does letting go of anything else.
unsafe extern "C" fn unlock(file: *mut sqlite3_file, level: c_int) -> c_int {
    real_file!(file, xUnlock(level), ffi::SQLITE_IOERR_UNLOCK)
}

unsafe extern "C" fn check_reserved_lock(file: *mut sqlite3_file, out: *mut c_int) -> c_int {
    // SAFETY: contract 3.
    if unsafe { ours(file) }.device.crashed() {
        return ffi::SQLITE_IOERR_CHECKRESERVEDLOCK;
    }
    real_file!(file, xCheckReservedLock(out), ffi::SQLITE_IOERR_CHECKRESERVEDLOCK)
}

unsafe extern "C" fn file_control(
    file: *mut sqlite3_file,
    control: c_int,
    argument: *mut c_void,
) -> c_int {
    match control {
        // These let the real file grow or be written behind our back; SQLite can do without.
        ffi::SQLITE_FCNTL_SIZE_HINT => ffi::SQLITE_OK,
        ffi::SQLITE_FCNTL_CHUNK_SIZE | ffi::SQLITE_FCNTL_MMAP_SIZE => ffi::SQLITE_NOTFOUND,
        // No other changes a file, so these work after a power cut too.
        _ => real_file!(file, xFileControl(control, argument), ffi::SQLITE_NOTFOUND),
    }
}

unsafe extern "C" fn sector_size(file: *mut sqlite3_file) -> c_int {
    real_file!(file, xSectorSize(), 0)
}

unsafe extern "C" fn device_characteristics(file: *mut sqlite3_file) -> c_int {
    real_file!(file, xDeviceCharacteristics(), 0)
}

unsafe extern "C" fn shm_map(
    file: *mut sqlite3_file,
    region: c_int,
    size: c_int,
    extend: c_int,
    out: *mut *mut c_void,
) -> c_int {
    // SAFETY: contract 3.
    if unsafe { ours(file) }.device.crashed() {
        return ffi::SQLITE_IOERR_SHMMAP;
    }
    real_file!(file, xShmMap(region, size, extend, out), ffi::SQLITE_IOERR_SHMMAP)
}

unsafe extern "C" fn shm_lock(
    file: *mut sqlite3_file,
    offset: c_int,
    count: c_int,
    flags: c_int,
) -> c_int {
    // SAFETY: contract 3.
    if flags & ffi::SQLITE_SHM_LOCK != 0 && unsafe { ours(file) }.device.crashed() {
        return ffi::SQLITE_IOERR_SHMLOCK;
    }
    real_file!(file, xShmLock(offset, count, flags), ffi::SQLITE_IOERR_SHMLOCK)
}

unsafe extern "C" fn shm_barrier(file: *mut sqlite3_file) {
    real_file!(file, xShmBarrier(), ());
}

unsafe extern "C" fn shm_unmap(file: *mut sqlite3_file, delete: c_int) -> c_int {
    real_file!(file, xShmUnmap(delete), ffi::SQLITE_OK)
}
