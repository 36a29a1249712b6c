/// A named place where a torture run may kill the process: `VEDETTA_FAILPOINT=name:N` dies at its
/// Nth passing. Compiled to nothing in the product.
#[inline]
pub fn failpoint(name: &str) {
    #[cfg(feature = "torture")]
    armed::pass(name);
    #[cfg(not(feature = "torture"))]
    let _ = name;
}

#[cfg(feature = "torture")]
mod armed {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicI64, Ordering};

    static ARMED: OnceLock<Option<(String, AtomicI64)>> = OnceLock::new();

    pub(super) fn pass(name: &str) {
        let armed = ARMED.get_or_init(|| {
            let setting = std::env::var("VEDETTA_FAILPOINT").ok()?;
            let (name, passes) = setting.split_once(':')?;
            Some((name.to_owned(), AtomicI64::new(passes.parse().ok()?)))
        });
        if let Some((wanted, left)) = armed
            && wanted == name
            && left.fetch_sub(1, Ordering::Relaxed) == 1
        {
            let _ = rustix::process::kill_process(
                rustix::process::getpid(),
                rustix::process::Signal::KILL,
            );
        }
    }
}
