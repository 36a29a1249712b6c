//! Compiles the few messages of the protocol that the benchmark sends and reads.

fn main() {
    let proto = "proto/bench.proto";
    println!("cargo::rerun-if-changed={proto}");
    let messages = protox::compile([proto], ["proto"]).expect("the definitions are right");
    tonic_prost_build::configure()
        .bytes(".")
        .build_client(false)
        .compile_fds(messages)
        .expect("code comes of them");
}
